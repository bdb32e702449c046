"""Random numbers that are a pure function of `(seed, index)`.

The generator is counter-based (splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
So a sampled token does not depend on the batch that it was sampled in, or on interruptions of its request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one random number in [0, 1) per pair of an unsigned 64-bit seed and an index, with 53 random bits: [N]."""
    # Mix seeds first: else seed s at index i would equal seed s + golden at index i - 1.
    start = _mix(np.array(seeds, dtype=np.uint64))
    state = start + (np.array(indices, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
