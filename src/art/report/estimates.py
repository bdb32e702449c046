"""Means with 95 % intervals by Student's t, which suits small samples."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959964
"""Normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and the ends of its 95 % interval, which are infinite for a single value."""

    mean: float
    low: float
    high: float
    count: int
    """Number of values."""

    def text(self, *, sign: bool = False) -> str:
        """Write the estimate for people, e.g. `0.42 (0.35 to 0.49)`."""
        form = "+.2f" if sign else ".2f"
        if not math.isfinite(self.low):
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of independent values.

    Example: estimate([0.2, 0.4, 0.6]) has the mean 0.4 and the interval -0.097 to 0.897.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("cannot estimate the mean of an empty list")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean=mean, low=-math.inf, high=math.inf, count=1)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=len(values))


def mean_with_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean and 95 % interval: Wilson's score interval when all values are 0 or 1, else Student's t.

    Example: 50 wins of 100 give (0.5, (0.404, 0.596)).
    """
    if not values:
        return math.nan, (math.nan, math.nan)
    if all(value in (0.0, 1.0) for value in values):
        mean = statistics.fmean(values)
        return mean, wilson_interval(mean, len(values))
    own = estimate(values)
    return own.mean, (own.low, own.high)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was measured on `count` independent trials."""
    z = Z_95
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


@functools.lru_cache(maxsize=4096)
def t_quantile(degrees: int, share: float = 0.975) -> float:
    """Return the quantile of Student's t distribution below which `share` of it lies.

    Example: t_quantile(11) is 2.201, the half width of a 95 % interval of 12 values in standard errors.

    Args:
        degrees: degrees of freedom, at least 1.
        share: at least 0.5 and below 1.
    """
    if degrees >= _EXPANDED_FROM:
        return _expanded(float(degrees), Z_95 if share == 0.975 else statistics.NormalDist().inv_cdf(share))
    low, high = 0.0, 1.0
    while _t_share(high, degrees) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return high


_EXPANDED_FROM = 100
"""Degrees of freedom from which the expansion is exact to six digits, for shares up to 0.999999."""


def _expanded(n: float, z: float) -> float:
    """Return the quantile for many degrees of freedom, by the expansion 26.7.5 of Abramowitz and Stegun."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))


def _t_share(quantile: float, degrees: int) -> float:
    """Return the share of the distribution below `quantile`, which is not negative.

    These are the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun.
    """
    angle = math.atan(quantile / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    terms = [] if degrees == 1 else [term]
    for k in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        terms.append(term)
    total = math.fsum(terms)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + inside / 2
