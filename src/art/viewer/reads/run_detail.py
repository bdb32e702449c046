"""Everything about one run beside its line in the list: splits, metrics, settings, findings, jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from art.config import ModelSettings
from art.metrics.meanings import meaning_of
from art.viewer.answers.run_list import Metric, RunDetail, RunSummary, SplitSteps
from art.viewer.index.files import FileState, Place
from art.viewer.reads.curves_of_run import banded_metrics
from art.viewer.run_files import RunFiles

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
