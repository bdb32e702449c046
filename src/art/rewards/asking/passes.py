"""Compares two passes over a group (judgements in opposite orders), and shrinks scores by the noise that this shows.

Reliability r is the share of the variance within the group that both passes agree on, 2 cov / (var + var). It is 1 for
passes that differ at most in level, and 0 for unrelated ones. The mean of two passes has reliability 2r / (1 + r)
(Spearman 1910, Brown 1910). With a known reliability, the best estimate of a noiseless score is the group's mean plus
reliability times the score's distance from it (Kelley 1927); `shrink` does that with the reliability of the one group,
which few scores tell badly. Order bias is opposite in the two passes: it cancels in their mean, and lowers r.
docs/decisions/0030 says why shrinking is not the default.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two passes over a group (a judge's scores with the trajectories shown in opposite orders) agree."""

    disagreement: float
    """Root mean square difference of the two scores of a trajectory, each relative to the mean of its pass."""
    single_reliability: float
    """Reliability of one pass, 0 to 1. It is 1 if all scores within each pass are equal."""

    @property
    def reliability(self) -> float:
        """Reliability of the mean of both passes, 0 to 1."""
        return 2 * self.single_reliability / (1 + self.single_reliability)


def compare_passes(first: Sequence[float], second: Sequence[float]) -> Agreement:
    """Measure how far two passes over a group agree, from the scores of its trajectories in each.

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
    """Move scores towards their mean: only the share `reliability` of their distance from it is kept."""
    mean = statistics.fmean(scores)
    return [mean + reliability * (score - mean) for score in scores]


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]
