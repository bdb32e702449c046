"""Curves of metrics over steps, one step, and the ledgers of steps: what became of every sampled token.

Where a curve has more steps than points, consecutive steps become one point: the mean of their values, with an interval
from the standard errors of the steps. No step is left out and none is chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from art.errors import NotFoundError
from art.metrics.catalogue import PLAN_METRICS
from art.metrics.findings import RULES
from art.metrics.groups import SECTIONS
from art.metrics.scores import t_quantile
from art_page.index_files import TRAIN
from art_page.indexing import Sums
from art_page.run_answers import (
    LedgerAnswer,
    RunFinding,
    Series,
    SeriesAnswer,
    SeriesQuery,
    StepDetail,
    StepLedger,
)
from art_page.run_files import RunFiles

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


def read_series(run: RunFiles, query: SeriesQuery) -> SeriesAnswer:
    """Return the curves that a query asks for."""
    with run.refreshed():
        series = [
            as_series(name, thin(curve(run, name, query.first, query.last), query.max_points))
            for name in dict.fromkeys(query.metric)
        ]
    return SeriesAnswer(series=series)


def curve(run: RunFiles, metric: str, first: int | None = None, last: int | None = None) -> list[CurvePoint]:
    """Return every point of a metric, in the order of steps. Hold the lock of `run`."""
    # A metric without a split in its name is summed over the splits that have it.
    split = metric.partition("/")[0]
    rows = run.indexer.store.read(
        "SELECT step, clusters, n, s, xx, ss, sn, nn FROM files JOIN sums ON sums.file = files.id WHERE run = ? "
        "AND metric = ? AND (split = ? OR ?)",
        (run.number, metric, split, split in SECTIONS),
    )
    sums: dict[int, Sums] = {}
    for step, *values in rows:
        if (first is None or first <= step) and (last is None or step <= last):
            sums[step] = sums[step] + Sums(*values) if step in sums else Sums(*values)
    logged = run.points(metric).between(first, last)
    rows_of_step = zip(logged.means.tolist(), logged.counts.tolist(), strict=True)
    means = dict(zip(logged.steps.tolist(), rows_of_step, strict=True))
    points = []
    for step in sorted(means.keys() | sums.keys()):
        mean, num_rows = means.get(step, (math.nan, 0))
        interval = sums[step].interval() if step in sums else None
        # One row with another mean is a number that the script gave itself; the rollouts' interval is not its own.
        if interval is None or (num_rows == 1 and abs(interval.mean - mean) > _SAME * max(1.0, abs(mean))):
            points.append(CurvePoint(step, mean))
            continue
        error = None if interval.high is None else (interval.high - interval.mean) / t_quantile(interval.num - 1)
        points.append(CurvePoint(step, interval.mean, interval.low, interval.high, error, int(sums[step].n)))
    return points


def banded_metrics(run: RunFiles) -> set[str]:
    """Return the metrics that rollouts of the run have values of."""
    rows = run.indexer.store.read(
        "SELECT DISTINCT metric FROM sums WHERE file IN (SELECT id FROM files WHERE run = ?)", (run.number,)
    )
    return {metric for (metric,) in rows}


def thin(points: list[CurvePoint], max_points: int) -> list[CurvePoint]:
    """Join consecutive points until there are at most `max_points`."""
    width = math.ceil(len(points) / max_points)
    if width <= 1:
        return points
    return [_joined(points[i : i + width]) for i in range(0, len(points), width)]


def _joined(points: list[CurvePoint]) -> CurvePoint:
    """Make one point of consecutive ones. It has an interval if each of them has one."""
    if len(points) == 1:
        return points[0]
    mean = math.fsum(point.mean for point in points) / len(points)
    num = sum(point.num for point in points if point.num is not None) or None
    joined = CurvePoint(points[len(points) // 2].step, mean, num=num, num_steps=len(points))
    errors = [point.error for point in points if point.error is not None]
    if len(errors) < len(points):
        return joined
    error = math.sqrt(math.fsum(value**2 for value in errors)) / len(points)
    return replace(joined, low=mean - _Z * error, high=mean + _Z * error, error=error)


def as_series(metric: str, points: list[CurvePoint]) -> Series:
    """Make the answer of a curve's points."""
    split = metric.partition("/")[0]
    has_band = any(point.low is not None for point in points)
    has_num = any(point.num is not None for point in points)
    return Series(
        metric=metric, split=None if "/" not in metric or split in SECTIONS else split,
        steps=[point.step for point in points], mean=[point.mean for point in points],
        low=[point.low for point in points] if has_band else None,
        high=[point.high for point in points] if has_band else None,
        num=[point.num for point in points] if has_num else None,
        num_steps=[point.num_steps for point in points] if any(point.num_steps > 1 for point in points) else None,
    )  # fmt: skip


_SAMPLED, _TRAINED, _CONTEXT = "ledger/sampled_tokens", "ledger/trained_tokens", "ledger/context_tokens"
_DROPPED = "ledger/dropped_tokens/"
MEANINGS = {
    "trained": PLAN_METRICS[_TRAINED].meaning,
    "context": PLAN_METRICS[_CONTEXT].meaning,
    "no_reward_spread": "the rollouts of the group have equal rewards, so that none is better than another",
    "no_preference_pair": "no rollout of the group is better or worse than this one",
    "truncated": "the token limit cut off an answer of the rollout, and `mask_truncated` is set",
    "sampler_mismatch": "the trainer's log-probs differ from those of the sampler by more than `mismatch` allows",
    "constraint_mismatch": "a token could not be drawn under the grammar or the kept tokens that were recorded",
}
"""What the destinations of sampled tokens mean."""


def describe_step(run: RunFiles, step: int) -> StepDetail:
    """Describe a step.

    Raises:
        NotFoundError: nothing is known of the step.
    """
    with run.refreshed():
        metrics = run.metrics_at(step)
        findings = [finding for finding in run.jobs.findings if finding.step == step]
        steps = run.steps()
        ledger = _ledger(run, step, step)
    counts = run.indexer.store.read(
        "SELECT num_groups, num_rollouts FROM files WHERE run = ? AND split = ? AND step = ?", (run.number, TRAIN, step)
    )
    if not metrics and not counts:
        raise NotFoundError(f"{run.project}/{run.name} has no step {step}", param="step")
    num_groups, num_rollouts = counts[0] if counts else (0, 0)
    if not findings:  # the job is not known: by the names that were logged
        names = [name.removeprefix("findings/") for name in metrics if name.startswith("findings/")]
        texts = [f"{RULES[name].meaning}. {RULES[name].advice}" if name in RULES else name for name in names]
        findings = [RunFinding(step=step, name=name, text=text) for name, text in zip(names, texts, strict=True)]
    earlier, later = steps[steps < step], steps[steps > step]
    return StepDetail(
        step=step, metrics=metrics, findings=findings, ledger=ledger,
        seconds={phase: value for name, value in metrics.items() if (phase := phase_of(name)) is not None},
        num_groups=num_groups, num_rollouts=num_rollouts, previous=int(earlier[-1]) if len(earlier) else None,
        next=int(later[0]) if len(later) else None,
    )  # fmt: skip


def phase_of(name: str) -> str | None:
    """Return the part of a step whose time a metric says; `None` for another metric.

    Example: `publish` for `time/publish_s`, `trainer` for `time/step_trainer_s`, `gpu/rollouts` for
    `time/step_s/gpu/rollouts`.
    """
    if name.startswith("time/step_s/"):
        return name.removeprefix("time/step_s/")
    is_time = name.startswith("time/step_") or name == "time/publish_s"
    return name.removeprefix("time/").removeprefix("step_").removesuffix("_s") if is_time else None


def sum_ledgers(run: RunFiles, first: int | None, last: int | None) -> LedgerAnswer:
    """Sum the ledgers of the steps from `first` to `last`, both included."""
    with run.refreshed():
        ledger = _ledger(run, first, last)
        steps = run.points(_SAMPLED).between(first, last).steps
    return LedgerAnswer(
        ledger=ledger, first=int(steps[0]) if len(steps) else None, last=int(steps[-1]) if len(steps) else None,
        num_steps=len(steps), meanings=MEANINGS,
    )  # fmt: skip


def _ledger(run: RunFiles, first: int | None, last: int | None) -> StepLedger | None:
    """Sum the ledgers of a range of steps. Each logged row has one: a step may have had training jobs before it."""
    names = [name for name in run.metric_names() if name.startswith("ledger/")]
    if _SAMPLED not in names:
        return None
    counts = {}
    for name in names:
        points = run.points(name).between(first, last)
        counts[name] = round(float(np.sum(points.means * points.counts))) if len(points.steps) else 0
    reasons = [name for name, count in counts.items() if name.startswith(_DROPPED) and count]
    if not counts[_SAMPLED]:
        return None
    return StepLedger(
        sampled=counts[_SAMPLED], trained=counts.get(_TRAINED, 0), context=counts.get(_CONTEXT, 0),
        dropped={name.removeprefix(_DROPPED): counts[name] for name in sorted(reasons, key=lambda name: -counts[name])},
    )  # fmt: skip
