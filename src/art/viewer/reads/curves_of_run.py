"""Curves of metrics over steps, with intervals where rollouts have the values, thinned without hiding or inventing.

Where a curve has more steps than points, consecutive steps become one point: the mean of their values, with an interval
from the standard errors of the steps. No step is left out and none is chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from art.metrics.groups import SECTIONS
from art.report.estimates import t_quantile
from art.viewer.answers.curves import Series, SeriesAnswer, SeriesQuery
from art.viewer.index.sums import Sums
from art.viewer.reads.columns import Points
from art.viewer.run_files import RunFiles

_Z = 1.959964
"""Normal quantile of a 95 % interval, for points of several steps, whose errors are pooled."""
_SAME = 1e-6
"""Relative difference up to which a logged mean counts as that of the step's rollouts."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve."""

    step: int
    mean: float
    low: float | None = None
    high: float | None = None
    error: float | None = None
    """Standard error of the mean."""
    num: int | None = None
    """Number of rollouts."""
    num_steps: int = 1


def read_series(run: RunFiles, number: int, query: SeriesQuery) -> SeriesAnswer:
    """Return the curves that a query asks for.

    Args:
        number: number of the run in the index.
    """
    with run.refreshed():
        series = [_read_one(run, number, name, query) for name in dict.fromkeys(query.metric)]
        damaged = run.num_damaged_rows
    return SeriesAnswer(series=series, num_unreadable_lines=damaged)


def _read_one(run: RunFiles, number: int, metric: str, query: SeriesQuery) -> Series:
    sums = _sums(run, number, metric, query.first, query.last)
    logged = run.points(metric).between(query.first, query.last)
    if sums:
        return _series(metric, thin(_curve(logged, sums), query.max_points))
    points = _thin_logged(logged, query.max_points)
    return Series(
        metric=metric,
        split=_split_of(metric),
        steps=points.steps.tolist(),
        mean=points.means.tolist(),
        low=None,
        high=None,
        num=None,
        num_steps=points.counts.tolist() if len(points.steps) < len(logged.steps) else None,
    )


def _thin_logged(points: Points, max_points: int) -> Points:
    """Do what `thin` does for a metric without intervals; the counts become numbers of steps."""
    width = max(1, math.ceil(len(points.steps) / max_points))
    firsts = np.arange(0, len(points.steps), width)
    counts = np.diff(np.append(firsts, len(points.steps)))
    means = np.add.reduceat(points.means, firsts) / counts if len(firsts) else points.means
    return Points(points.steps[firsts + counts // 2], means, counts)


def curve(
    run: RunFiles, number: int, metric: str, first: int | None = None, last: int | None = None
) -> list[CurvePoint]:
    """Return every point of a metric, in the order of steps. Hold the lock of `run`."""
    return _curve(run.points(metric).between(first, last), _sums(run, number, metric, first, last))


def _curve(logged: Points, sums: dict[int, Sums]) -> list[CurvePoint]:
    rows = {
        int(step): (float(mean), int(count))
        for step, mean, count in zip(logged.steps, logged.means, logged.counts, strict=True)
    }
    points = []
    for step in sorted(rows.keys() | sums.keys()):
        mean, count = rows.get(step, (math.nan, 0))
        points.append(_point(step, mean, count, sums.get(step)))
    return points


def banded_metrics(run: RunFiles, number: int) -> set[str]:
    """Return the metrics that rollouts of the run have values of."""
    rows = run.indexer.store.read(
        "SELECT DISTINCT metric FROM sums WHERE file IN (SELECT id FROM files WHERE run = ?)", (number,)
    )
    return {metric for (metric,) in rows}


def thin(points: list[CurvePoint], max_points: int) -> list[CurvePoint]:
    """Join consecutive points until there are at most `max_points`."""
    width = math.ceil(len(points) / max_points)
    if width <= 1:
        return points
    return [_joined(points[i : i + width]) for i in range(0, len(points), width)]


def _sums(run: RunFiles, number: int, metric: str, first: int | None, last: int | None) -> dict[int, Sums]:
    """Sums of a metric by step. A metric without a split in its name is summed over the splits that have it."""
    split = metric.partition("/")[0]
    rows = run.indexer.store.read(
        "SELECT step, clusters, n, s, xx, ss, sn, nn FROM files JOIN sums ON sums.file = files.id WHERE run = ? "
        "AND metric = ? AND (split = ? OR ?) AND step BETWEEN ? AND ?",
        (number, metric, split, split in SECTIONS, _bound(first, -1), _bound(last, 1)),
    )
    sums: dict[int, Sums] = {}
    for step, *values in rows:
        sums[step] = sums[step] + Sums(*values) if step in sums else Sums(*values)
    return sums


def _bound(value: int | None, sign: int) -> int:
    return sign * 2**62 if value is None else max(-(2**62), min(2**62, value))


def _point(step: int, mean: float, num_rows: int, sums: Sums | None) -> CurvePoint:
    """Make a point of what was logged for a step and of what its rollouts have.

    One row with another mean is a number that the script gave itself; the interval of the rollouts is not its own.
    """
    if sums is None:
        return CurvePoint(step, mean)
    interval = sums.interval()
    if num_rows == 1 and abs(interval.mean - mean) > _SAME * max(1.0, abs(mean)):
        return CurvePoint(step, mean)
    error = None if interval.high is None else (interval.high - interval.mean) / t_quantile(interval.num - 1)
    return CurvePoint(step, interval.mean, interval.low, interval.high, error, int(sums.n))


def _joined(points: list[CurvePoint]) -> CurvePoint:
    """Make one point of consecutive ones. It has an interval if each of them has one."""
    if len(points) == 1:
        return points[0]
    mean = math.fsum(point.mean for point in points) / len(points)
    errors = [point.error for point in points if point.error is not None]
    joined = CurvePoint(
        points[len(points) // 2].step,
        mean,
        num=sum(point.num for point in points if point.num is not None) or None,
        num_steps=len(points),
    )
    if len(errors) < len(points):
        return joined
    error = math.sqrt(math.fsum(value**2 for value in errors)) / len(points)
    return replace(joined, low=mean - _Z * error, high=mean + _Z * error, error=error)


def _split_of(metric: str) -> str | None:
    split = metric.partition("/")[0]
    return None if "/" not in metric or split in SECTIONS else split


def _series(metric: str, points: list[CurvePoint]) -> Series:
    has_band = any(point.low is not None for point in points)
    has_num = any(point.num is not None for point in points)
    return Series(
        metric=metric,
        split=_split_of(metric),
        steps=[point.step for point in points],
        mean=[point.mean for point in points],
        low=[point.low for point in points] if has_band else None,
        high=[point.high for point in points] if has_band else None,
        num=[point.num for point in points] if has_num else None,
        num_steps=[point.num_steps for point in points] if any(point.num_steps > 1 for point in points) else None,
    )
