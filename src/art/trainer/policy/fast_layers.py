"""Choose the adapted layers that run on merged or packed weights, which is faster in float32 on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress

from art.kernels.packed_linear import MIN_ELEMENTS, packing_pays
from art.trainer.machine.memory import available_bytes
from art.trainer.policy.linear import PACKED_ROWS, AdaptedLinear

_log = logging.getLogger(__name__)

_MAX_MERGED_BYTES = 2**29
"""Most memory for merged copies. They are as large as the layers and are recomputed in each update."""


def layers_to_merge(layers: Sequence[AdaptedLinear]) -> list[AdaptedLinear]:
    """Choose the layers that run on merged weights: those not packed, or none if the copies would be too large."""
    plain = [layer for layer in layers if layer.packed is None]
    return plain if sum(layer.base_layer.weight.nbytes for layer in plain) <= _MAX_MERGED_BYTES else []


def pack_where_faster(layers: Sequence[AdaptedLinear]) -> None:
    """Pack (reorder for oneDNN) the weights of layers that measure faster that way, if the copies fit into memory."""
    large = [layer for layer in layers if layer.base_layer.weight.numel() >= MIN_ELEMENTS]
    weights = [layer.base_layer.weight for layer in large]
    pays = [packing_pays(*w.shape, num_rows=PACKED_ROWS, dtype=w.dtype, backward=True) for w in weights]
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
