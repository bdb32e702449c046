"""Adapted linear layers in float32 on CPU: y = x W^T + bias + scale * (x A^T) B^T as one autograd function.

peft's own layer adds the adapter with four more passes over the output and three over its gradient. Here a layer is
- *merged*: W + scale * B A is computed once per update and used in place of W. The forward pass and the gradient of x
  cost no more than without an adapter, and only the gradients of A and B take low-rank products;
- or *packed*: the two products with the frozen W (x W^T forward, g W backward) run on copies of W in oneDNN's order, if
  that measures faster (`art.kernels.packed_linear`), and low-rank products add the adapter.

Other devices, dtypes and quantised layers keep peft's layer. Import this module late: it imports peft.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor
from torch.nn.functional import linear

from art.kernels.packed_linear import MIN_ELEMENTS, pack, packed_linear, packing_pays
from art.trainer.machine.memory import available_bytes

_log = logging.getLogger(__name__)

_ROWS = 256
"""Rows that packed weights are laid out for: tokens of a typical micro-batch."""

_MAX_MERGED_BYTES = 2**29
"""Most memory for merged copies. They are as large as the layers and are recomputed in each update."""


class AdaptedLinear(PeftLinear):  # type: ignore[misc]  # peft is not followed by the type checker
    """A linear layer with a LoRA adapter, used like peft's layer but with faster forward and backward passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed: tuple[Tensor, Tensor] | None = None
        """Copies of the weight W and its transpose in oneDNN's order; `None` until `pack` is called."""
        self._merged: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters:  # also while folded weights replace those of the base layer
            return super().forward(x, *args, **kwargs)
        base, (a, b, scale) = self.base_layer, self._factors()
        if self._merged is None:
            return _AdaptedProduct.apply(x, a, b, base.weight, base.bias, scale, self.packed)
        return _MergedProduct.apply(x, a, b, self._merged, base.bias, scale)

    def merge(self) -> None:
        """Compute the weight W + scale * B A from the adapter's current A and B, and use it until the next call."""
        a, b, scale = self._factors()
        self._merged = torch.addmm(self.base_layer.weight, b.detach(), a.detach(), alpha=scale)

    def _factors(self) -> tuple[Tensor, Tensor, float]:
        """Return A [r, in], B [out, r] and the scale of their product."""
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]

    def pack(self) -> None:
        """Use copies of the weight in oneDNN's order in all products from now on."""
        weight = self.base_layer.weight.detach()
        self.packed = pack(weight, _ROWS), pack(weight.T.contiguous(), _ROWS)


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute [..., out] from x [..., in], A [r, in], B [out, r] and the frozen W [out, in]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        packed: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        out = linear(rows, weight, bias) if packed is None else packed_linear(rows.contiguous(), packed[0], bias)
        inner = rows @ a.T  # [N, r]
        out.addmm_(inner, b.T, alpha=scale)
        ctx.save_for_backward(x, inner, a, b, weight)
        ctx.scale, ctx.packed = scale, packed
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, a, b, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        grad_inner = _grad_inner(grad, b, ctx.scale)
        grad_a, grad_b = grad_inner @ rows, _grad_b(grad, inner.T, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight if ctx.packed is None else packed_linear(grad.contiguous(), ctx.packed[1], None)
            grad_x = grad_x.addmm_(grad_inner.T, a).view(x.shape)
        return grad_x, grad_a, grad_b, None, None, None, None


class _MergedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute [..., out] from x [..., in] and the merged weight [out, in]. A [r, in] and B [out, r] get gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, merged: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(x, a, b, merged)
        ctx.scale = scale
        return linear(x, merged, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, merged = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        grad_a, grad_b = _grad_inner(grad, b, ctx.scale) @ rows, _grad_b(grad, a @ rows.T, ctx.scale)
        grad_x = (grad @ merged).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, grad_a, grad_b, None, None, None


# These orders of factors are fast at every rank. The transposed ones take four times as long at rank 8 (measured at 256
# to 2,048 columns), and the same time at rank 16.


def _grad_inner(grad: Tensor, b: Tensor, scale: float) -> Tensor:
    """Gradient [r, N] of (x A^T)^T from the gradient [N, out] of the output."""
    return (b.T.contiguous() @ grad.T).mul_(scale)


def _grad_b(grad: Tensor, inner: Tensor, scale: float) -> Tensor:
    """Gradient [out, r] of B. `inner` [r, N] is (x A^T)^T."""
    return (inner.contiguous() @ grad).mul_(scale).T


# -- which layers are merged, which are packed --


def layers_to_merge(layers: Sequence[AdaptedLinear]) -> list[AdaptedLinear]:
    """Choose the layers that run on merged weights: those not packed, or none if the copies would be too large."""
    plain = [layer for layer in layers if layer.packed is None]
    return plain if sum(layer.base_layer.weight.nbytes for layer in plain) <= _MAX_MERGED_BYTES else []


def pack_where_faster(layers: Sequence[AdaptedLinear]) -> None:
    """Pack (reorder for oneDNN) the weights of layers that measure faster that way, if the copies fit into memory."""
    large = [layer for layer in layers if layer.base_layer.weight.numel() >= MIN_ELEMENTS]
    weights = [layer.base_layer.weight for layer in large]
    pays = [packing_pays(*w.shape, num_rows=_ROWS, dtype=w.dtype, backward=True) for w in weights]
    chosen = list(compress(large, pays))
    if not chosen:
        return
    size_bytes = 2 * sum(layer.base_layer.weight.nbytes for layer in chosen)
    available = available_bytes()
    if available is not None and size_bytes > available / 2:
        _log.warning(
            "packed copies of %d layers would make training faster, but they take %.1f GB, more than half of the "
            "memory that is available; not packed",
            len(chosen),
            size_bytes / 1e9,
        )
        return
    for layer in chosen:
        layer.pack()
    _log.info(
        "%d of %d layers run on packed copies of their weights, %.1f GB", len(chosen), len(layers), size_bytes / 1e9
    )
