"""Sums of rollouts' numbers, from which the mean of a step and its 95 % interval follow.

Rollouts of one scenario are alike, so they are not independent. A *cluster* is the rollouts of one scenario in one
logged group. With S_c and n_c the sum and number of values in cluster c, C clusters and the mean m = sum S_c / sum n_c:

    variance of m = C / (C - 1) * sum (S_c - n_c m)^2 / (sum n_c)^2

which is the usual cluster-robust (linearised) variance of a ratio. A single cluster says nothing about other scenarios;
the interval is then that of its rollouts. Sums add up, so they grow with the file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from art.metrics.groups import metric_name
from art.report.estimates import t_quantile
from art.viewer.answers.base import Interval

MOST_METRICS = 64
"""Metrics of a file whose sums are kept. Programs that make up names by the rollout have no use for them."""


class Sums(NamedTuple):
    """Sums over the rollouts of a step that have a value of one metric."""

    clusters: float
    """Number of clusters C."""
    n: float
    """Number of values."""
    s: float
    """Sum of the values."""
    xx: float
    """Sum of their squares."""
    ss: float
    """Sum of S_c^2."""
    sn: float
    """Sum of S_c n_c."""
    nn: float
    """Sum of n_c^2."""

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(*(mine + its for mine, its in zip(self, other, strict=True)))

    def interval(self) -> Interval:
        """Estimate the mean. Its interval is clustered by scenario, or over rollouts where there is one cluster.

        Example: clusters (0, 0) and (1, 1) have the mean 0.5 and, with t = 12.7, the interval -5.85 to 6.85.
        """
        mean = self.s / self.n
        if self.clusters > 1:
            count = self.clusters
            spread = self.ss - 2 * mean * self.sn + mean * mean * self.nn
            variance = count / (count - 1) * max(spread, 0.0) / self.n**2
        elif self.n > 1:
            count = self.n
            variance = max(self.xx - self.n * mean * mean, 0.0) / (count - 1) / count
        else:
            return Interval(mean=mean, num=int(self.n))
        half = t_quantile(int(count) - 1) * math.sqrt(variance)
        return Interval(mean=mean, low=mean - half, high=mean + half, num=int(count))


def sum_group(split: str, rollouts: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, Sums]:
    """Sum the numbers of one logged group by the full name of each metric.

    Args:
        rollouts: number of the scenario and numbers of each rollout.
    """
    by_metric: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for scenario, numbers in rollouts:
        for name, value in numbers.items():
            if not name.startswith("costs/"):
                by_metric[name][scenario].append(value)
    return {
        metric_name(name, split): Sums(
            clusters=len(clusters),
            n=sum(map(len, clusters.values())),
            s=math.fsum(map(sum, clusters.values())),
            xx=math.fsum(value * value for values in clusters.values() for value in values),
            ss=math.fsum(sum(values) ** 2 for values in clusters.values()),
            sn=math.fsum(sum(values) * len(values) for values in clusters.values()),
            nn=math.fsum(len(values) ** 2 for values in clusters.values()),
        )
        for name, clusters in by_metric.items()
        if len(name) <= 200
    }
