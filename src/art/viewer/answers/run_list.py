"""Answers about runs: what trains, how it goes, and what is known about one run. A run is a model of a project."""

from __future__ import annotations

from typing import Any, Literal

from art.protocol.job_states import JobKind, JobState
from art.viewer.answers.base import Answer, Indexing, Interval
from art.viewer.answers.checkpoint_list import StepChange

RunState = Literal["training", "waiting", "serving", "idle", "finished", "failed"]
"""
- `training`: a training job runs.
- `waiting`: a training job is queued.
- `serving`: no training job, and the model has answered requests in the last minute.
- `idle`: none of these, in a directory that a server uses.
- `finished`: none of these, and no server uses the directory.
- `failed`: the newest training job failed, and nothing has happened since.
"""


class Finding(Answer):
    """Something that a person should know about a step."""

    step: int
    name: str | None
    """Name of the finding in the catalogue; null for a sentence that is not from it."""
    text: str


class CurrentReward(Interval):
    """The newest reward of a run."""

    num: int
    """Number of rollouts."""
    split: str
    step: int


class Trend(Answer):
    """How the main metric changes, by a straight line through its newest steps (at most 50)."""

    change_per_step: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the slope; null for fewer than three steps."""


class Spark(Answer):
    """The main metric in at most 60 points. All lists have one entry per point."""

    steps: list[int]
    mean: list[float]
    low: list[float | None]
    high: list[float | None]


class RunSummary(Answer):
    """One line of the list of runs."""

    headline: StepChange | None
    """The task's own metric on held-out rollouts, from the first step to the last; null without held-out rollouts."""

    project: str
    name: str
    base_model: str | None
    """Null where only files are left, and no database that says it."""
    state: RunState
    step: int
    """The newest step: of the published checkpoint, or of what was logged."""
    num_rollouts: int
    """Number of logged rollouts; a lower bound while `indexing` is not null."""
    reward: CurrentReward | None
    trend: Trend | None
    spark: Spark | None
    main_metric: str | None
    """Name of the metric of `reward`, `trend` and `spark`; `val/reward` is chosen before `train/reward`."""
    seconds_per_step: float | None
    """Median time between the newest steps (at most 20)."""
    costs_usd: float | None
    eta_s: float | None = None
    """Seconds until the run ends, where the number of its steps is known."""
    now: str | None = None
    """One sentence: what runs, and who waits for whom."""
    findings: list[Finding]
    """The newest five."""
    updated_at: float | None
    started_at: float | None
    indexing: Indexing | None = None


class RunList(Answer):
    """All runs, those with the newest changes first."""

    runs: list[RunSummary]
    now: float
    """Time of the answer."""


class SplitSteps(Answer):
    """The steps of a split that have logged rollouts."""

    split: str
    steps: list[tuple[int, int]]
    """Ranges `[first, last]` of steps without a gap, in order."""


class Metric(Answer):
    """A metric that the run has values of."""

    name: str
    unit: str | None = None
    meaning: str | None = None
    """What it says, from the catalogue; null for a metric of the user."""
    num_points: int
    """Number of steps that have a value."""
    has_band: bool
    """Whether rollouts have values of it, which give an interval per step."""


class Job(Answer):
    """One job of the run."""

    id: str
    kind: JobKind
    state: JobState
    step: int | None
    error: str | None
    created_at: float | None
    started_at: float | None
    ended_at: float | None


class RunDetail(RunSummary):
    """What is known about one run."""

    splits: list[SplitSteps]
    metrics: list[Metric]
    settings: dict[str, Any]
    """Settings of the model without defaults, and what was recorded of the run: sections `program`, `task`, `recipe`,
    `training`, `pipeline` and those of `record_settings`."""
    all_findings: list[Finding]
    """The newest 1,000, newest first."""
    jobs: list[Job]
    """The newest 20, newest first."""
    num_unreadable_lines: int
    """Lines of the run's files that are damaged and were skipped."""
