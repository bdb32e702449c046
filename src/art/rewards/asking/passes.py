"""Two passes over a group in opposite orders: how far they agree, and what that leaves of the scores.

Reliability is the share of the spread within the group that both passes see, 2 cov / (var + var): 1 for passes that
agree but for the level, 0 where nothing of the first is in the second. The mean of two passes has reliability
2r / (1 + r) (Spearman 1910, Brown 1910), and the best estimate of what a judge without noise would have said lies that
far from the group's mean (Kelley 1927). So noise shrinks the advantages, and order bias, which is opposite in the two
passes, cancels in their mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    disagreement: float
    """Root mean square difference of the two scores of a trajectory, each taken relative to the mean of its pass."""
    single_reliability: float
    """0 to 1, of one pass. 1 where neither pass sees a difference."""

    @property
    def reliability(self) -> float:
        """0 to 1, of the mean of both passes."""
        return 2 * self.single_reliability / (1 + self.single_reliability)


def compare_passes(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """How two passes over the same group agree.

    Example: (0, 1) and (0.2, 0.8) differ by 0.2 on each trajectory; reliability of one pass 0.88, of the mean 0.94.
    """
    a, b = _centred(first), _centred(second)
    disagreement = math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    spread = sum(x * x for x in a) + sum(y * y for y in b)
    if spread < 1e-12:
        return Agreement(disagreement=disagreement, single_reliability=1.0)
    shared = 2 * sum(x * y for x, y in zip(a, b, strict=True)) / spread
    return Agreement(disagreement=disagreement, single_reliability=max(0.0, shared))


def shrink(scores: Sequence[float], reliability: float) -> list[float]:
    """`scores` pulled to their mean."""
    mean = statistics.fmean(scores)
    return [mean + reliability * (score - mean) for score in scores]


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]
