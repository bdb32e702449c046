"""The adapter that samples alone: its update is added to a copy of the weights, and then costs nothing per token.

Agents in training sample with one adapter most of the time. Its thin products take a fifth to a third of the time of a
small layer (they read every input and every output once more), so the decoder keeps one folded copy of the weights: of
the adapter that has lately had whole batches to itself. Batches of several adapters run on factors, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from art.engines.torch.weights.linear import Linear, Run

_AFTER_STEPS = 3
"""Batches in a row that an adapter must have to itself, so that turns between adapters do not fold each time."""
_MAX_BYTES = 1 << 30
"""Of the copy. Beyond it the gain is small: products with large weights leave little to thin ones."""


class Folding:
    """Which adapter is folded into `linears`."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        weights = [linear.weight for linear in linears]
        # Only in float32: half precision would round the small update away.
        exact = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        self._linears = linears if exact and sum(weight.nbytes for weight in weights) <= _MAX_BYTES else []
        self._folded_uid: int | None = None
        self._last_uid: int | None = None
        self._num_steps = 0

    def covers(self, runs: list[Run], num_rows: int) -> bool:
        """Whether all `num_rows` rows of this step's batch are the folded adapter's; folds it when it is time."""
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
