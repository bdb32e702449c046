"""The list of runs, one line about each, and what else is known of a run: splits, metrics, settings, findings, jobs."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art.config import ModelSettings
from art.errors import InvalidRequestError
from art.metrics.catalogue import meaning_of
from art.report.scores import t_quantile
from art.storage.checkpoints import list_steps
from art.storage.layout import DataDir, ModelPaths, validate_name
from art.viewer.checkpoints import measure_change
from art.viewer.curves import CurvePoint, banded_metrics, curve, thin
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import FileState, Place
from art.viewer.live_state import LiveState, RunFacts, RunNow, describe_run, read_num_steps
from art.viewer.rollout_answers import Answer
from art.viewer.run_answers import CurrentReward, Job, Metric, RunDetail, RunSummary, Spark, SplitSteps, Trend
from art.viewer.run_files import RunFiles

MAIN_METRICS = ("val/reward", "train/reward", "test/reward", "data/reward_mean", "loss/sft", "loss/train")
"""The main metric is the first of these that has two values, or else any value."""
_SPARK_POINTS = 60
_TREND_STEPS = 50
_PACE_STEPS = 20
_FINDINGS = 5
MODELS_FOLDER = "models"


def list_names(data_dir: DataDir, database: ReadOnlyDatabase, project: str | None = None) -> list[tuple[str, str]]:
    """List project and name of every run that the database or a folder knows."""
    names = set(database.read("SELECT project, name FROM models"))
    for folder in _folders(data_dir.root):
        names |= {(folder.name, model.name) for model in _folders(folder / MODELS_FOLDER)}
    return sorted((p, n) for p, n in names if project in (None, p))


class RunLine(Answer):
    """A run in one line, as far as its files say it. `add_state` adds what happens at this moment."""

    summary: RunSummary
    training_job: Job | None
    """The newest job that trains."""


def summarize(run: RunFiles, number: int) -> RunLine:
    """Describe a run in one line.

    Args:
        number: number of the run in the index.
    """
    with run.refreshed():
        metric = _main_metric(run)
        points = [] if metric is None else curve(run, number, metric)
        findings = run.jobs.findings[-_FINDINGS:][::-1]
        times = run.times()
        steps = run.steps().tolist()
        costs_usd = run.costs.total_usd()
        training_job = run.jobs.training_job()
    registered = run.database.read(
        "SELECT base_model, step, created_at FROM models WHERE project = ? AND name = ?", (run.project, run.name)
    )
    base_model, step, created_at = registered[0] if registered else (None, None, None)
    ((num_rollouts,),) = run.indexer.store.read("SELECT total(num_rollouts) FROM files WHERE run = ?", (number,))
    summary = RunSummary(
        headline=measure_change(run, number),
        project=run.project,
        name=run.name,
        base_model=base_model,
        state="finished",
        step=_newest_step(run, step, steps),
        num_rollouts=int(num_rollouts),
        reward=_current(metric, points),
        trend=_trend(points[-_TREND_STEPS:]),
        spark=_spark(thin(points, _SPARK_POINTS)) if points else None,
        main_metric=metric,
        seconds_per_step=_pace(times),
        costs_usd=costs_usd,
        findings=findings,
        updated_at=max([*times.values(), *_changed(run.paths.history, run.paths.costs)], default=created_at or None),
        started_at=created_at or min(times.values(), default=None),
    )
    return RunLine(summary=summary, training_job=training_job)


def add_state(line: RunLine, paths: ModelPaths, live: LiveState | None, *, is_used: bool) -> RunSummary:
    """Add the state of a run, the sentence about it, and the time that is left.

    Args:
        live: the server that runs here; `None` if this program only reads the files.
        is_used: whether a server uses the data directory.
    """
    summary, job = line.summary, line.training_job
    facts = RunFacts(
        project=summary.project,
        name=summary.name,
        step=summary.step,
        seconds_per_step=summary.seconds_per_step,
        num_steps=read_num_steps(paths),
        training_job=job,
        is_used=is_used,
    )
    now: RunNow = describe_run(facts, live)
    updated = [moment for moment in (summary.updated_at, job and (job.ended_at or job.started_at)) if moment]
    return summary.model_copy(
        update={"state": now.state, "now": now.now, "eta_s": now.eta_s, "updated_at": max(updated, default=None)}
    )


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder whose names can be those of projects and models."""
    paths = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(InvalidRequestError, OSError):
                if entry.is_dir() and validate_name(entry.name, param="name"):
                    paths.append(Path(entry.path))
    return paths


def _main_metric(run: RunFiles) -> str | None:
    known = run.metric_names()
    present = [metric for metric in MAIN_METRICS if metric in known]
    several = [metric for metric in present if len(run.points(metric).steps) > 1]
    return next(iter([*several, *present]), None)


def _newest_step(run: RunFiles, published: int | None, logged: Iterable[int]) -> int:
    if published is not None:
        return int(published)
    with contextlib.suppress(OSError):
        return max([*logged, *list_steps(run.paths.checkpoints)], default=0)
    return max(logged, default=0)


def _current(metric: str | None, points: Sequence[CurvePoint]) -> CurrentReward | None:
    if metric is None or not points:
        return None
    last = points[-1]
    return CurrentReward(
        split=metric.partition("/")[0], step=last.step, mean=last.mean, low=last.low, high=last.high, num=last.num or 1
    )


def _spark(points: Sequence[CurvePoint]) -> Spark:
    return Spark(
        steps=[point.step for point in points],
        mean=[point.mean for point in points],
        low=[point.low for point in points],
        high=[point.high for point in points],
    )


def _trend(points: Sequence[CurvePoint]) -> Trend | None:
    """Fit a straight line through points by least squares."""
    if len(points) < 2:
        return None
    steps, values = [float(point.step) for point in points], [point.mean for point in points]
    slope, start = statistics.linear_regression(steps, values)
    if len(points) == 2:
        return Trend(change_per_step=slope, low=None, high=None)
    middle = statistics.fmean(steps)
    spread = math.fsum((step - middle) ** 2 for step in steps)
    residuals = math.fsum((value - start - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    degrees = len(points) - 2
    half = t_quantile(degrees) * math.sqrt(residuals / degrees / spread)
    return Trend(change_per_step=slope, low=slope - half, high=slope + half)


def _pace(times: dict[int, float]) -> float | None:
    """Median seconds from one of the newest steps to the next."""
    steps = sorted(times)[-_PACE_STEPS - 1 :]
    passed = [(times[later] - times[earlier]) / (later - earlier) for earlier, later in itertools.pairwise(steps)]
    passed = [seconds for seconds in passed if seconds > 0]
    return statistics.median(passed) if passed else None


def _changed(*paths: Path) -> list[float]:
    moments = []
    for path in paths:
        with contextlib.suppress(OSError):
            moments.append(min(path.stat().st_mtime, time.time()))
    return moments


_UNITS = (
    ("_usd", "USD"), ("_per_s", "per second"), ("_s", "s"), ("_sec", "s"), ("_bytes", "bytes"), ("_share", "share"),
    ("_rate", "share"), ("_tokens", "tokens"), ("_per_rollout", "per rollout"),
)  # fmt: skip


def detail(run: RunFiles, number: int, summary: RunSummary, files: dict[Place, FileState]) -> RunDetail:
    """Describe one run.

    Args:
        number: number of the run in the index.
        files: the files on the disk that have its rollouts.
    """
    banded = banded_metrics(run, number)
    ((num_damaged,),) = run.indexer.store.read("SELECT total(num_damaged) FROM files WHERE run = ?", (number,))
    with run.refreshed():
        names, nums = sorted({*run.metric_names(), *banded}), run.nums_of_points()
        metrics = [
            Metric(
                name=name,
                unit=unit_of(name),
                meaning=meaning_of(name),
                num_points=nums.get(name, 0),
                has_band=name in banded,
            )
            for name in names
        ]
        findings, jobs = run.jobs.findings[::-1], run.jobs.newest
        num_damaged += run.history.num_damaged + run.costs.num_damaged
    return RunDetail(
        **summary.model_dump(),
        splits=_splits(files),
        metrics=metrics,
        settings=_settings(run),
        all_findings=findings,
        jobs=jobs,
        num_unreadable_lines=int(num_damaged),
    )


def unit_of(name: str) -> str | None:
    """Return the unit of a metric, which its name ends or begins with."""
    if name.startswith("costs/"):
        return "USD"
    if name.startswith(("data/step_tokens/", "data/cum/tokens/", "ledger/")):
        return "tokens"
    if name.startswith(("time/step_s/", "time/cum/")):
        return "s"
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), None)


def _splits(files: Iterable[Place]) -> list[SplitSteps]:
    steps: dict[str, list[int]] = defaultdict(list)
    for split, step in files:
        steps[split].append(step)
    return [SplitSteps(split=split, steps=ranges(numbers)) for split, numbers in sorted(steps.items())]


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Join numbers to ranges without gaps. Example: 1, 2, 3, 7 give (1, 3), (7, 7)."""
    joined: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if joined and number <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], number)
        else:
            joined.append((number, number))
    return joined


def _settings(run: RunFiles) -> dict[str, Any]:
    recorded = run.recorded_settings()
    rows = run.database.read("SELECT settings FROM models WHERE project = ? AND name = ?", (run.project, run.name))
    try:
        settings = ModelSettings.model_validate_json(rows[0][0]).model_dump(mode="json", exclude_defaults=True)
    except (IndexError, ValidationError):  # not registered here, or of another version
        settings = {}
    return {**recorded.pop("settings", {}), **settings, **recorded}
