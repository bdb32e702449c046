"""Means, scores over scenarios and differences of two models on the same scenarios, with 95 % intervals.

The scenario is the unit: several rollouts of one scenario are averaged first, because they are not independent.

    values                                   a score                 a difference
    one rollout each, all 0 or 1             Wilson's interval       Tango's interval for paired shares
    anything else                            Student's t over scenarios, in both
    two evaluations of other scenarios                                 Newcombe's, from the intervals of both means

Wilson's and Tango's intervals invert a score test. Unlike Student's t they have a width where all values are equal: 20
wins of 20 give 0.84 to 1, not 1 to 1. Where Student's t has no width, a measure from 0 to 1 takes them too, with one
value per scenario.

A script that compares every new checkpoint with the same old one finds a "better" one by chance. Each comparison with
the same reference is therefore a *look*, and look k may err with the probability 0.05 / (k (k + 1)). These sum to 0.05
over any number of looks: 0.025 + 0.008 + 0.004 + ... The first look has the lower end of an ordinary 95 % interval.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

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
    return _student(values).as_estimate()


def mean_with_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean and 95 % interval: Wilson's score interval when all values are 0 or 1, else Student's t.

    Example: 50 wins of 100 give (0.5, (0.404, 0.596)).
    """
    if not values:
        return math.nan, (math.nan, math.nan)
    own = score_scenarios([[value] for value in values]).as_estimate()
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
    if degrees >= 100:  # the expansion 26.7.5 of Abramowitz and Stegun is exact to six digits then, up to 0.999999
        n, z = float(degrees), Z_95 if share == 0.975 else statistics.NormalDist().inv_cdf(share)
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + sum(term / n**power for power, term in enumerate(terms, start=1))
    low, high = 0.0, 1.0
    while _t_share(high, degrees) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return high


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


Method = Literal["wilson", "tango", "t"]
TAIL_95 = 0.025
"""Probability on each side of a 95 % interval."""
Scored = Iterable[tuple[Hashable, float]]
"""Id of the scenario and value of each rollout; the id is `None` where it is not known."""


class Score(BaseModel):
    """A mean over scenarios, or a mean difference, with its 95 % interval."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    low: float | None = None
    """Lower end of the interval; null for a single scenario, where it is not known."""
    high: float | None = None
    num: int
    """Number of scenarios."""
    method: Method
    """How the interval is computed: `wilson`, `tango` or `t`."""

    def text(self, *, sign: bool = False) -> str:
        """Write the score for people, e.g. `0.42 (0.35 to 0.49)`."""
        return self.as_estimate().text(sign=sign)

    def as_estimate(self) -> Estimate:
        """Return mean and interval alone, with infinite ends if they are not known."""
        low, high = (-math.inf, math.inf) if self.low is None or self.high is None else (self.low, self.high)
        return Estimate(mean=self.mean, low=low, high=high, count=self.num)


def score_scenarios(scenarios: Sequence[Sequence[float]]) -> Score:
    """Estimate a model's mean over scenarios.

    Args:
        scenarios: values of the rollouts of each scenario, at least one each.

    Raises:
        ValueError: there are no scenarios.
    """
    means = [statistics.fmean(values) for values in scenarios]
    if not means:
        raise ValueError("cannot score a model without scenarios")
    is_share = _is_share(scenarios)
    if is_share and (_are_single(scenarios) or len(set(means)) == 1):
        mean = statistics.fmean(means)
        low, high = wilson_interval(mean, len(means))
        return Score(mean=mean, low=max(0.0, low), high=min(1.0, high), num=len(means), method="wilson")
    return _student(means)


def score_difference(
    reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, tail: float = TAIL_95
) -> Score:
    """Estimate the mean of `other - reference`, scenario by scenario.

    Args:
        reference, other: values of the rollouts of the same scenarios, in the same order.
        tail: probability that the true difference lies below the interval, and the same above it.

    Raises:
        ValueError: there are no scenarios, or they are not the same number.
    """
    pairs = list(zip(reference, other, strict=True))
    if not pairs:
        raise ValueError("cannot compare models without common scenarios")
    changes = [statistics.fmean(new) - statistics.fmean(old) for old, new in pairs]
    if _is_share(reference) and _is_share(other):
        are_single = _are_single(reference) and _are_single(other)
        if are_single or not any(changes):
            gained, lost = (sum(change * side > 0 for change in changes) for side in (1, -1))
            low, high = tango_interval(gained, lost, len(changes), tail=tail)
            return Score(mean=statistics.fmean(changes), low=low, high=high, num=len(changes), method="tango")
    return _student(changes, tail)


def estimate_change(before: Scored, after: Scored) -> Estimate:
    """Estimate how much higher the mean is in a second evaluation than in a first one, with its 95 % interval.

    Scenarios that both have are compared with themselves, and others are left out. If there are none, the two are taken
    for independent samples: R. G. Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10.

    Example: 12 of 20 scenarios solved before, and the same and 6 more after, give +0.30 (+0.10 to +0.52).
    """
    sides: list[defaultdict[Hashable, list[float]]] = [defaultdict(list), defaultdict(list)]
    for side, rollouts in zip(sides, (before, after), strict=True):
        for scenario, value in rollouts:
            side[scenario].append(value)
    common = [scenario for scenario in sides[0] if scenario is not None and scenario in sides[1]]
    if common:
        return score_difference(*([side[scenario] for scenario in common] for side in sides)).as_estimate()
    values = [[value for own in side.values() for value in own] for side in sides]
    (old, (old_low, old_high)), (new, (new_low, new_high)) = map(mean_with_interval, values)
    return Estimate(
        mean=new - old, low=new - old - math.hypot(new - new_low, old_high - old),
        high=new - old + math.hypot(new_high - new, old - old_low), count=len(values[1]),
    )  # fmt: skip


def tango_interval(gained: int, lost: int, pairs: int, *, tail: float = TAIL_95) -> tuple[float, float]:
    """Return the interval, by default of 95 %, of a difference of two shares that were measured on the same pairs.

    T. Tango, Statistics in Medicine 17 (1998) 891-908: the differences that a score test with the restricted maximum
    likelihood estimate does not reject. At a difference of 0 it is McNemar's test.

    Example: 20 gained and 5 lost of 100 pairs give 0.056 to 0.249.

    Args:
        gained, lost: pairs in which only the second, or only the first, succeeded.
        tail: probability that the true difference lies below the interval, and the same above it.
    """
    mean, z = (gained - lost) / pairs, Z_95 if tail == TAIL_95 else statistics.NormalDist().inv_cdf(1 - tail)

    def statistic(difference: float) -> float:
        # The variance of `gained - lost` under this difference, at the most likely share of discordance.
        b = -gained - lost + (2 * pairs - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        share_lost = (math.sqrt(max(0.0, b * b - 8 * pairs * c)) - b) / (4 * pairs)
        variance = pairs * (2 * share_lost + difference * (1 - difference))
        distance = gained - lost - pairs * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    def bound(outer: float) -> float:
        inner = mean
        for _ in range(60):
            middle = (inner + outer) / 2
            is_inside = abs(statistic(middle)) < z if middle != mean else True
            inner, outer = (middle, outer) if is_inside else (inner, middle)
        return inner

    return bound(-1.0), bound(1.0)


def _student(values: Sequence[float], tail: float = TAIL_95) -> Score:
    mean, num = statistics.fmean(values), len(values)
    if num == 1:
        return Score(mean=mean, num=1, method="t")
    half = t_quantile(num - 1, 1 - tail) * statistics.stdev(values) / math.sqrt(num)
    return Score(mean=mean, low=mean - half, high=mean + half, num=num, method="t")


def _is_share(scenarios: Sequence[Sequence[float]]) -> bool:
    return all(value in (0.0, 1.0) for values in scenarios for value in values)


def _are_single(scenarios: Sequence[Sequence[float]]) -> bool:
    return all(len(values) == 1 for values in scenarios)


FALSE_PROMOTIONS = 0.05
"""Largest probability that any of all looks passes a checkpoint that is not better than the reference."""
MIN_SCENARIOS: Mapping[Method, int] = {"tango": 10, "t": 30}
"""Fewest scenarios of a comparison, by the method of its interval. With fewer, chance often looks certain.

Student's t needs more: of a candidate that gains a little in most scenarios and loses much in a few, 10 scenarios
often show the gains only.
"""

Values = Mapping[str, Sequence[float]]
"""Values of the rollouts of each scenario, by its id."""


def tail_of_look(look: int) -> float:
    """Return the probability with which the comparison number `look`, from 1 on, may pass what is not better."""
    return FALSE_PROMOTIONS / (look * (look + 1))


def measure_improvement(reference: Values, candidate: Values, *, look: int) -> Score | None:
    """Estimate `candidate - reference` on the scenarios that both have; `None` if there is none.

    Its `low` is the bound that an equal candidate exceeds with the probability `tail_of_look(look)`.
    """
    common = sorted(reference.keys() & candidate.keys())
    if not common:
        return None
    pairs = [[values[name] for name in common] for values in (reference, candidate)]
    return score_difference(*pairs, tail=tail_of_look(look))
