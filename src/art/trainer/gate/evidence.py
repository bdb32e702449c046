"""What the gate knows of each rollout: sums over its tokens, which micro-batches and processes add up.

Branches of a rollout may lie in different micro-batches, on different processes. Each adds its part, so the judgement
does not depend on how an update was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from art.trainer.tree.pack import group_by_rollout
from art.trainer.tree.tree import SamplePath, sort_paths

BoolArray = NDArray[np.bool_]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Log-ratios (log pi - log mu of sampled tokens) of the R rollouts of an update, as sums. All arrays are [R]."""

    counts: Array
    """Number of tokens; 0 for a rollout that was not seen."""
    totals: Array
    squares: Array
    """Sum of the squares, each cut at the square of `limit`."""
    lowest: Array
    """Smallest log-ratio of a token, at most 0."""
    highest: Array
    """Largest log-ratio of a token, at least 0."""

    @classmethod
    def collect(cls, log_ratio: Array, rollouts: NDArray[np.int64], num_rollouts: int, *, limit: float) -> Evidence:
        """Sum up the log-ratios [N] of tokens of the rollouts with the indices `rollouts` [N].

        `limit`: a token that is further off counts as this far off in `squares`, so that a few do not decide.
        """
        squares = np.minimum(np.abs(log_ratio), limit) ** 2
        lowest, highest = np.zeros(num_rollouts), np.zeros(num_rollouts)
        np.minimum.at(lowest, rollouts, log_ratio)
        np.maximum.at(highest, rollouts, log_ratio)
        return cls(
            counts=np.bincount(rollouts, minlength=num_rollouts).astype(np.float64),
            totals=np.bincount(rollouts, log_ratio, minlength=num_rollouts).astype(np.float64),
            squares=np.bincount(rollouts, squares, minlength=num_rollouts).astype(np.float64),
            lowest=lowest,
            highest=highest,
        )

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            counts=self.counts + other.counts,
            totals=self.totals + other.totals,
            squares=self.squares + other.squares,
            lowest=np.minimum(self.lowest, other.lowest),
            highest=np.maximum(self.highest, other.highest),
        )


def find_repeats(paths: Sequence[SamplePath]) -> dict[str, BoolArray]:
    """Find the targets that an earlier branch of the same rollout has too: [N] booleans by sample id.

    Branches without any are left out. Samples that a server makes have none: each answer is a target of one branch.
    """
    repeats: dict[str, BoolArray] = {}
    for branches in group_by_rollout(paths):
        if len(branches) == 1:
            continue
        order, shared = sort_paths(branches)
        known = np.full(max(len(path.token_ids) for path in branches), -1, dtype=np.int64)  # target at each query
        for index, depth in zip(order, shared, strict=True):
            path = branches[index]
            known[depth:] = -1
            again = known[path.query_positions] == path.target_token_ids
            if again.any():
                repeats[path.sample.sample_id] = again
            known[path.query_positions] = path.target_token_ids
    return repeats
