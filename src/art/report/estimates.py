"""Means with their 95 % interval: small samples, so by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964
"""Normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, and the ends of its 95 % interval. They are infinite where one value says nothing about the others."""

    mean: float
    low: float
    high: float
    count: int
    """Values that it is the mean of."""

    def text(self, *, sign: bool = False, digits: int = 2) -> str:
        """Such as `0.42 (0.35 to 0.49)`."""
        form = f"{'+' if sign else ''}.{digits}f"
        if not math.isfinite(self.low):
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values that are independent of each other.

    Example: estimate([0.2, 0.4, 0.6]) has the mean 0.4 and the interval -0.097 to 0.897.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("there is no mean of no values")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean=mean, low=-math.inf, high=math.inf, count=1)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=len(values))


def estimate_change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of `after - before`, pair by pair: how much scenarios differ from each other does not widen it.

    Raises:
        ValueError: there are no pairs.
    """
    return estimate([new - old for old, new in zip(before, after, strict=True)])


def t_quantile(degrees: int) -> float:
    """The 0.975 quantile of Student's t.

    Exact for 1 and 2 degrees of freedom, from there on the expansion of Abramowitz and Stegun, 26.7.5: at 3 degrees it
    is 0.4 % too small, from 5 on less than 0.1 %.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = _Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))
