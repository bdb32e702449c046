"""Measures how far scores agree with labels within a group, since only differences within a group become advantages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations


def pairwise_accuracy(scores: Sequence[float], labels: Sequence[float]) -> tuple[float, int]:
    """Count the pairs whose labels differ, and those among them that the scores order correctly: `(right, pairs)`.

    A pair with equal scores counts as half right.
    Example: scores (0.2, 0.9, 0.9) with labels (0, 1, 2) have 2.5 of 3 pairs right.
    """
    right, pairs = 0.0, 0
    for (score, label), (other_score, other_label) in combinations(zip(scores, labels, strict=True), 2):
        if label == other_label:
            continue
        pairs += 1
        difference = (score - other_score) * (label - other_label)
        right += 0.5 if difference == 0 else float(difference > 0)
    return right, pairs


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, with ties at their mean rank. NaN if all values of one sequence are equal.

    Example: (1, 2, 3) with (10, 30, 20) give 0.5.
    """
    a, b = _ranks(first), _ranks(second)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope through the origin of `(x, y)` points, and its standard error.

    Both are NaN if all x are 0. The error is also NaN for a single point.
    """
    spread = sum(x * x for x, _ in points)
    if spread == 0:
        return math.nan, math.nan
    value = sum(x * y for x, y in points) / spread
    if len(points) < 2:
        return value, math.nan
    residual = sum((y - value * x) ** 2 for x, y in points) / (len(points) - 1)
    return value, math.sqrt(residual / spread)
