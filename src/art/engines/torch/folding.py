"""Folding: an adapter that fills whole batches is added to a copy of the weights, and then costs nothing per token.

Agents in training sample with one adapter most of the time. Its low-rank products take a fifth to a third of the time
of a small layer, because they read every input and output once more. So the decoder keeps one folded copy of the
weights, for the adapter of the last batches. Batches with several adapters use the low-rank factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from art.engines.torch.linear import Linear, Run

_AFTER_STEPS = 3
"""Consecutive batches that an adapter must fill alone before it is folded, so that alternating adapters are not."""
_MAX_BYTES = 1 << 30
"""Largest copy to keep, in bytes. Above it the adapter's share of the work is too small to matter."""


class Folding:
    """Folds one adapter at a time into (adds it to a copy of) the weights of `linears`, and knows which."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        weights = [linear.weight for linear in linears]
        # Only in float32: 16-bit weights would round the small update away.
        exact = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        self._linears = linears if exact and sum(weight.nbytes for weight in weights) <= _MAX_BYTES else []
        self._folded_uid: int | None = None
        self._last_uid: int | None = None
        self._num_steps = 0

    def covers(self, runs: list[Run], num_rows: int) -> bool:
        """Return whether all `num_rows` rows of a batch use the folded adapter. This call may fold it first."""
        if not self._linears or len(runs) != 1 or runs[0].end - runs[0].start != num_rows:
            self._last_uid = None
            return False
        adapter = runs[0].adapter
        if adapter.uid == self._folded_uid:
            return True
        self._num_steps = self._num_steps + 1 if adapter.uid == self._last_uid else 1
        self._last_uid = adapter.uid
        if self._num_steps < _AFTER_STEPS:
            return False
        for linear in self._linears:
            linear.fold(adapter.factors[linear.index])
        self._folded_uid = adapter.uid
        return True
