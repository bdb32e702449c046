"""Adapted linear layers in float32 on CPU: y = x W^T + bias + scale * (x A^T) B^T as one autograd function.

peft's own layer adds the adapter with four more passes over the output and three over its gradient. Here either
- W + scale * B A is made once per update and stands in for W: the forward pass and the gradient of x then cost nothing
  more than without an adapter, and only the gradients of A and B take thin products (`merge`);
- or, since W is frozen, its two products (x W^T forward, g W backward) run on copies of W that oneDNN has put into its
  own order, and thin products add to what is there (`pack`). Which is faster depends on the processor: where torch's
  default library knows it well nothing is gained, on AVX-512 processors of AMD packing wins by a factor of two. So it
  is measured, by shape.

Other devices, dtypes and quantised layers keep peft's layer. Import this module late: it imports peft.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor
from torch.nn.functional import linear

_log = logging.getLogger(__name__)

_ROWS = 256
"""Tokens of the measurement."""

_MIN_GAIN = 1.15
"""Packed copies take memory, twice that of the layers; a smaller gain is not worth it, and might be noise."""

_MAX_MERGED_BYTES = 2**29
"""Merged copies take as much memory as the layers, and are made anew in each update."""

_MIN_ELEMENTS = 2**16
"""Smaller weights stay in the cache, and are not packed."""


class AdaptedLinear(PeftLinear):  # type: ignore[misc]  # peft is not followed by the type checker
    """peft's layer with another forward pass: the same names, files and switches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packed: tuple[Tensor, Tensor] | None = None
        self._merged: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters:  # also while other weights stand in for the base layer's own
            return super().forward(x, *args, **kwargs)
        base, (a, b, scale) = self.base_layer, self._factors()
        out: Tensor
        if self._merged is None:
            out = _AdaptedProduct.apply(x, a, b, base.weight, base.bias, scale, self._packed)
        else:
            out = _MergedProduct.apply(x, a, b, self._merged, base.bias, scale)
        return out

    def merge(self) -> None:
        """Run on W + scale * B A of the present factors, until the next call."""
        a, b, scale = self._factors()
        self._merged = torch.addmm(self.base_layer.weight, b.detach(), a.detach(), alpha=scale)

    def _factors(self) -> tuple[Tensor, Tensor, float]:
        """A [r, in], B [out, r] and the scale of their product."""
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self) -> None:
        """Run the products with W on packed copies from now on."""
        self._packed = _pack(self.base_layer.weight)


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """x [..., in], A [r, in], B [out, r] and the frozen W [out, in] give [..., out]."""

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
        out = linear(rows, weight, bias) if packed is None else _packed_product(rows, packed[0], bias)
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
            grad_x = grad @ weight if ctx.packed is None else _packed_product(grad, ctx.packed[1], None)
            grad_x = grad_x.addmm_(grad_inner.T, a).view(x.shape)
        return grad_x, grad_a, grad_b, None, None, None, None


class _MergedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """x [..., in] and the merged weight [out, in] give [..., out]; A [r, in] and B [out, r] take part in gradients."""

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


# Thin products go the way round in which torch's library is fast at every rank: the other one takes four times as long
# at rank 8 (measured at 256 to 2,048 columns), and as long at rank 16.


def _grad_inner(grad: Tensor, b: Tensor, scale: float) -> Tensor:
    """Gradient [r, N] of x A^T, transposed, from that of the output [N, out]."""
    return (b.T.contiguous() @ grad.T).mul_(scale)


def _grad_b(grad: Tensor, inner: Tensor, scale: float) -> Tensor:
    """Gradient [out, r] of B; `inner` [r, N] is x A^T, transposed."""
    return (inner.contiguous() @ grad).mul_(scale).T


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W for x W^T, and W^T for g W, in oneDNN's order."""
    pack = torch.ops.mkldnn._reorder_linear_weight
    return pack(weight.detach(), _ROWS), pack(weight.detach().T.contiguous(), _ROWS)


def _packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), packed, bias, "none", [], "")
    return out


# -- what pays --


def layers_to_merge(layers: Sequence[AdaptedLinear]) -> list[AdaptedLinear]:
    """Those that gain by it: not the packed ones, and none if the copies are large, which gain least."""
    plain = [layer for layer in layers if not layer.is_packed]
    return plain if sum(layer.base_layer.weight.nbytes for layer in plain) <= _MAX_MERGED_BYTES else []


def pack_where_faster(layers: Sequence[AdaptedLinear]) -> int:
    """Pack the layers whose shape measures faster that way, if the copies fit into memory; returns how many."""
    chosen = []
    for layer in layers:
        num_out, num_in = layer.base_layer.weight.shape
        if num_out * num_in >= _MIN_ELEMENTS and _packing_pays(num_out, num_in, torch.get_num_threads()):
            chosen.append(layer)
    if not chosen:
        return 0
    size_bytes = 2 * sum(layer.base_layer.weight.nbytes for layer in chosen)
    if size_bytes > _available_bytes() / 2:
        _log.warning(
            "packed copies of %d layers would make training faster, but their %.1f GB are more than half of the memory "
            "that is free; not packed",
            len(chosen),
            size_bytes / 1e9,
        )
        return 0
    for layer in chosen:
        layer.pack()
    _log.info(
        "%d of %d layers run on packed copies of their weights, %.1f GB", len(chosen), len(layers), size_bytes / 1e9
    )
    return len(chosen)


@lru_cache(maxsize=256)
def _packing_pays(num_out: int, num_in: int, num_threads: int) -> bool:
    """Whether both products of a weight [out, in] together measure faster packed, by `_MIN_GAIN`.

    The operators are private to torch, so they are tried and compared first. `num_threads` is part of the cache's key.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(shape, generator=generator) for shape in ((num_out, num_in), (_ROWS, num_in), (_ROWS, num_out))
    )
    try:
        packed = _pack(weight)
        found = _packed_product(x, packed[0], None), _packed_product(grad, packed[1], None)
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.info("packed weights are not available here: %s", error)
        return False
    for one, other in zip(found, (x @ weight.T, grad @ weight), strict=True):
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max())):
            _log.warning("packed weights of shape [%d, %d] give other results; not used", num_out, num_in)
            return False
    plain_s, packed_s = _measure(
        lambda: (linear(x, weight), grad @ weight),
        lambda: (_packed_product(x, packed[0], None), _packed_product(grad, packed[1], None)),
    )
    _log.info("weight [%d, %d]: %.2f ms plain, %.2f ms packed", num_out, num_in, plain_s * 1e3, packed_s * 1e3)
    return plain_s > packed_s * _MIN_GAIN


def _measure(*calls: Callable[[], object], repeats: int = 5) -> list[float]:
    """Best time of each in seconds; they take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - started)
    return best


def _available_bytes() -> float:
    """Memory that can be taken without swapping; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
