"""Adapted linear layers in float32 on CPU: y = x W^T + bias + scale * (x A^T) B^T as one autograd function.

peft's own layer adds the adapter with four more passes over the output and three over its gradient; here products add
to what is there. And since W is frozen, its two products (x W^T forward, g W backward) can run on copies of W that
oneDNN has put into its own order. Which is faster depends on the processor: where torch's default library knows it well
nothing is gained, on AVX-512 processors of AMD packing wins by a factor of two. So it is measured, by shape.

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

_MIN_ELEMENTS = 2**16
"""Smaller weights stay in the cache, and are not packed."""


class AdaptedLinear(PeftLinear):  # type: ignore[misc]  # peft is not followed by the type checker
    """peft's layer with another forward pass: the same names, files and switches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packed: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters:  # also while other weights stand in for the base layer's own
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        base, a, b = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        out: Tensor = _AdaptedProduct.apply(x, a, b, base.weight, base.bias, self.scaling[name], self._packed)
        return out

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
        grad_inner = (grad @ b).mul_(ctx.scale)  # [N, r]
        grad_a = grad_inner.T @ rows
        grad_b = (grad.T @ inner).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight if ctx.packed is None else _packed_product(grad, ctx.packed[1], None)
            grad_x = grad_x.addmm_(grad_inner, a).view(x.shape)
        return grad_x, grad_a, grad_b, None, None, None, None


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W for x W^T, and W^T for g W, in oneDNN's order."""
    pack = torch.ops.mkldnn._reorder_linear_weight
    return pack(weight.detach(), _ROWS), pack(weight.detach().T.contiguous(), _ROWS)


def _packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), packed, bias, "none", [], "")
    return out


# -- what pays --


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
