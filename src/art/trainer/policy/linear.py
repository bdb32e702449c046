"""Adapted linear layers: y = x W^T + bias + scale * (x A^T) B^T as one autograd function.

peft's own layer keeps a float32 copy of x for each adapted layer, and adds the adapter with four more passes over the
output and three over its gradient. Here A and B are float32 and are rounded to the dtype of x for the products, as an
engine rounds them. Their gradients are sums over tokens in float32. What is kept for the backward pass is x A^T and x
itself, which layers with the same input share. The input of an MLP's last layer is not kept (`LoraLinear.gated`).

A layer of any kind is used as it is, e.g. one with 4-bit weights; then the low-rank products are a function of their
own.

Import this module late: it imports peft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor
from torch.nn.functional import linear

from art.trainer.policy.lean import gated_input

Activation: TypeAlias = Callable[[Tensor], Tensor]

_CHUNK = 1024
"""Tokens whose numbers are converted to float32 at a time, where a product cannot return float32."""


class LoraLinear(PeftLinear):  # type: ignore[misc]  # peft is not followed by the type checker
    """A linear layer with a LoRA adapter, used like peft's layer but with less memory and faster passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_off = False
        """Whether the layer runs without its adapter. Peft's own switch visits each layer's parts, which takes long."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_off:
            out: Tensor = self.base_layer(x)
            return out
        if self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        base, (a, b, scale) = self.base_layer, self._factors()
        if not self.is_plain:
            return _LowRankSum.apply(base(x), x, a, b, scale)
        return _AdaptedProduct.apply(x, None, a, b, base.weight, base.bias, scale, None)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Apply the layer to `activation(gate) * up`, and compute that product again for the backward pass."""
        if self.is_off or self.disable_adapters or not self.is_plain:
            return self(gated_input(gate, up, activation))
        base, (a, b, scale) = self.base_layer, self._factors()
        return _AdaptedProduct.apply(gate, up, a, b, base.weight, base.bias, scale, activation)

    @property
    def is_plain(self) -> bool:
        """Whether the adapted layer is a product with a weight, not a quantised or otherwise special layer."""
        return type(self.base_layer) is torch.nn.Linear

    def _factors(self) -> tuple[Tensor, Tensor, float]:
        """Return A [r, in], B [out, r] and the scale of their product."""
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute [..., out] from x [..., in], A [r, in], B [out, r] and the frozen W [out, in].

    With `up` [..., in] the input is activation(x) * up. Then x and up are kept, and the input is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        a: Tensor,
        b: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        activation: Activation | None,
    ) -> Tensor:
        whole = x if up is None or activation is None else activation(x) * up
        rows = whole.flatten(0, -2)
        out = linear(rows, weight, bias)
        inner = rows @ a.T.to(x.dtype)  # [N, r]
        out.addmm_(inner, b.T.to(x.dtype), alpha=scale)
        ctx.save_for_backward(x, up, inner, a, b, weight)
        ctx.scale, ctx.activation = scale, activation
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, inner, a, b, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_inner, grad_b = _grad_inner(grad, b, ctx.scale), _grad_b(grad, inner.T, ctx.scale)
        leaves: tuple[Tensor, ...] = (x,)
        whole = x
        if up is not None:
            with torch.enable_grad():
                leaves = x.detach().requires_grad_(), up.detach().requires_grad_()
                whole = ctx.activation(leaves[0]) * leaves[1]
        grad_a = _sum_over_tokens(grad_inner, whole.detach().flatten(0, -2))
        grad_x = grad_up = None
        if any(ctx.needs_input_grad[:2]):
            grad_x = (grad @ weight).addmm_(grad_inner.T, a.to(x.dtype)).view(x.shape)
            if up is not None:
                grad_x, grad_up = torch.autograd.grad(whole, leaves, grad_x)
        return grad_x, grad_up, grad_a, grad_b, None, None, None, None


class _LowRankSum(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Compute out + scale * (x A^T) B^T from out [..., out], x [..., in], A [r, in] and B [out, r]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        inner = x.flatten(0, -2) @ a.T.to(x.dtype)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale = scale
        return torch.addmm(out.flatten(0, -2), inner, b.T.to(x.dtype), alpha=scale).view(out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_inner = _grad_inner(grad, b, ctx.scale)
        grad_a, grad_b = _sum_over_tokens(grad_inner, x.flatten(0, -2)), _grad_b(grad, inner.T, ctx.scale)
        grad_x = (grad_inner.T @ a.to(x.dtype)).view(x.shape) if ctx.needs_input_grad[1] else None
        return grads[0], grad_x, grad_a, grad_b, None


# These orders of factors are fast at every rank. The transposed ones take four times as long at rank 8 (measured at 256
# to 2,048 columns), and the same time at rank 16.


def _grad_inner(grad: Tensor, b: Tensor, scale: float) -> Tensor:
    """Gradient [r, N] of (x A^T)^T from the gradient [N, out] of the output, in its dtype."""
    return (b.T.to(grad.dtype).contiguous() @ grad.T).mul_(scale)


def _grad_b(grad: Tensor, inner: Tensor, scale: float) -> Tensor:
    """Float32 gradient [out, r] of B. `inner` [r, N] is (x A^T)^T."""
    return _sum_over_tokens(inner.contiguous(), grad).mul_(scale).T


def _sum_over_tokens(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [r, N] by [N, k] of the same dtype. The sums over N tokens are computed and returned in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    total = left.new_zeros(len(left), right.shape[1], dtype=torch.float32)
    for part, rows in zip(left.split(_CHUNK, dim=1), right.split(_CHUNK), strict=True):
        total.addmm_(part.float(), rows.float())
    return total
