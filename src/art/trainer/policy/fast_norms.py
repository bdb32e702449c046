"""RMS norms in float32 on the CPU, with less than half of the passes over memory.

With n = rsqrt(mean(x^2) + eps), y = x n w and g the gradient of y:

    dx = g w n - x n^3 mean(g w x)        dw = sum of g x n over all rows

Autograd computes the same from the single operations of transformers' code, with twice as many passes over tensors of
the size of x. Sums are in another order, so numbers differ in their last digits.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-5
"""Largest relative error of the output. That of a norm with another formula is larger than 0.1."""


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """y = x * rsqrt(mean(x^2) + eps) * weight for x [..., H] and weight [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grads[0] * x).mul_(scale).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] * weight
            product = grad_x * x
            along = product.sum(-1, keepdim=True).mul_(scale**3).div_(x.shape[-1])
            grad_x.mul_(scale).sub_(torch.mul(x, along, out=product))
        return grad_x, grad_weight, None


def speed_up_norms(model: torch.nn.Module) -> None:
    """Replace the forward passes of a Hugging Face model's RMS norms by `_RmsNorm`, where both compute the same.

    Names and parameters of the modules stay as they are. Norms of another form are left alone.
    """
    verdicts: dict[tuple[type, float, bool], bool] = {}
    for module in list(model.modules()):
        kind: Any = type(module)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not kind.__name__.endswith("RMSNorm") or kind is torch.nn.RMSNorm or not isinstance(eps, float):
            continue
        key = (kind, eps, getattr(module, "weight", None) is not None)  # Gemma 4 has norms of one class without it
        if key not in verdicts:
            verdicts[key] = _is_plain(module, eps)
            if not verdicts[key]:
                _log.info("%s is not a plain RMS norm; it runs as in transformers", kind.__name__)
        if verdicts[key]:
            module.__class__ = _fast_norm(kind, eps)


@functools.cache
def _fast_norm(kind: Any, eps: float) -> type:
    """Make a subclass of a norm's class that computes it by `_RmsNorm`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = _RmsNorm.apply(x, self.weight, eps)
        return out

    return type(f"Fast{kind.__name__}", (kind,), {"forward": forward})


def _is_plain(norm: Any, eps: float) -> bool:
    """Whether the module computes what `_RmsNorm` does, by its output for small, usual and large numbers."""
    if [name for name, _ in norm.named_parameters()] != ["weight"] or norm.weight.dim() != 1:
        return False
    norm = copy.deepcopy(norm)  # with other weights: 1 or 0, as they are initialised, would hide what they do
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(norm.weight.shape, generator=generator)
    norm.weight.data = weight
    x = torch.randn(4, len(weight), generator=generator)
    try:
        with torch.no_grad():
            for factor in (1e-3, 1.0, 10.0):  # with the smallest, `eps` decides
                out, expected = _RmsNorm.apply(x * factor, weight, eps), norm(x * factor)
                if not torch.allclose(out, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                    return False
    except (TypeError, ValueError, RuntimeError, AttributeError):  # takes or returns something else
        return False
    return True
