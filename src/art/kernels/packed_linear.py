"""Weights of linear layers in oneDNN's own order ("packed"), used on the CPU where that measures faster.

How much is gained depends on the processor. Where torch's default library knows it well, packing gains nothing; on
AMD processors with AVX-512 packed products run twice as fast. So the choice is made by measuring, shape by shape. The
operators are private to torch: they are tried and compared with plain products first, and not used if they fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

_log = logging.getLogger(__name__)

MIN_ELEMENTS = 2**16
"""Smaller weights stay in the processor's cache, where packing gains nothing."""

MIN_GAIN = 1.1
"""Factor by which packed products must measure faster: just more than noise.

Measured on an AVX-512 processor with 32 to 256 rows, medians of 20 comparisons: the same product timed twice differs by
up to 1.07; packing gains 0.9 to 1.15 with weights up to [512, 512], and 1.2 to 1.8 with [768, 2048] and larger."""

_NUM_REPEATS = 5
_TOLERANCE = {torch.float32: (1e-3, 1e-4)}
"""Largest relative error of a number, and largest error as a share of the largest number."""
_TOLERANCE_16_BIT = (1e-2, 1e-2)


def pack(weight: Tensor, num_rows: int) -> Tensor:
    """Return a copy of `weight` [out, in] in oneDNN's order, the fastest for products with about `num_rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `rows` [N, in] by the transpose of a weight that `pack` made, and add `bias` [out]: [N, out]."""
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@lru_cache(maxsize=256)
def packing_pays(num_out: int, num_in: int, *, num_rows: int, dtype: torch.dtype, backward: bool) -> bool:
    """Return whether products with a weight [num_out, num_in] measure faster by `MIN_GAIN` if it is packed.

    The first call of a shape measures, with the threads that torch uses then; later ones return the same.

    Args:
        num_rows: rows of the measured products.
        backward: measure the product for the gradient of the input, [N, out] with [out, in], together with the forward
            product.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((num_out, num_in), (num_rows, num_in), (num_rows, num_out))
    )

    def plain_products() -> list[Tensor]:
        return [linear(x, weight), *([grad @ weight] if backward else [])]

    def packed_products() -> list[Tensor]:
        return [packed_linear(x, packed, None), *([packed_linear(grad, transposed, None)] if backward else [])]

    try:
        packed = pack(weight, num_rows)
        transposed = pack(weight.T.contiguous(), num_rows) if backward else packed
        products = packed_products()
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.info("packed weights are not available here: %s", error)
        return False
    relative, absolute = _TOLERANCE.get(dtype, _TOLERANCE_16_BIT)
    for product, expected in zip(products, plain_products(), strict=True):
        if not torch.allclose(product, expected, rtol=relative, atol=absolute * float(expected.abs().max())):
            _log.warning("packed weights of shape [%d, %d] give other results; not used", num_out, num_in)
            return False
    plain_s, packed_s = best_times(plain_products, packed_products)
    _log.info("weight [%d, %d]: %.2f ms plain, %.2f ms packed", num_out, num_in, plain_s * 1e3, packed_s * 1e3)
    return plain_s > packed_s * MIN_GAIN


def best_times(*calls: Callable[[], object]) -> list[float]:
    """Measure the shortest time of each call in seconds. They take turns, so that a busy machine slows all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(_NUM_REPEATS):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - started)
    return best
