"""Checkpoints of a run, and what changed between two of them."""

from __future__ import annotations

from pydantic import Field

from art.protocol.organisation.promotions import PromotionRecord
from art.viewer.answers.base import Answer, Interval, Query
from art.viewer.answers.rollout_rows import RolloutKey

MOST_PROMOTIONS = 200


class CheckpointRow(Answer):
    step: int
    created_at: float | None
    size_bytes: int
    is_newest: bool
    """Whether requests without a step get it and the next step starts from it."""
    is_best: bool
    """Whether it has the highest mean of `val/reward`; it is never deleted automatically."""
    is_promoted: bool
    """Whether it answers requests to `project/name@promoted`; it is never deleted."""
    metrics: dict[str, float]
    """Means of what was logged for its step."""
    parents: list[str] = []
    """Where it was forked or pulled from."""


class StepChange(Answer):
    """A metric of held-out rollouts at two steps."""

    metric: str
    """The headline metric of the run's task if the rollouts have it, else `reward`."""
    split: str
    a: int
    b: int
    """Equal to `a` if there is one evaluation only."""
    before: Interval | None
    """The mean over all rollouts at `a`."""
    after: Interval | None
    difference: Interval | None
    """Mean over scenarios of the paired difference `b - a`; null without common scenarios."""
    num_scenarios: int
    """Number of scenarios that both steps have."""


class CheckpointList(Answer):
    """Complete checkpoints on the disk, newest first."""

    checkpoints: list[CheckpointRow]
    best_metric: str
    compared: StepChange | None
    """Comparison to begin with: first and last step that share held-out scenarios."""
    promotions: list[PromotionRecord] = []
    """The decisions about the promoted checkpoint, newest first, refusals included; at most `MOST_PROMOTIONS`."""
    num_promotions: int = 0
    """How many there are."""


class CompareQuery(Query):
    """Which two steps to compare, on which split."""

    a: int
    b: int
    split: str = "val"
    metric: str | None = None
    """A metric of rollouts, or `reward`. Null: the headline metric of the run's task, if the rollouts have it."""
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1000)


class ScenarioChange(Answer):
    """One scenario at both steps."""

    scenario: str
    a: Interval
    b: Interval
    difference: float
    """Mean at `b` minus that at `a`."""
    rollouts_a: list[RolloutKey]
    rollouts_b: list[RolloutKey]
    """At most eight of each."""


class Comparison(StepChange):
    """A metric at two steps on the same scenarios, scenario by scenario."""

    scenarios: list[ScenarioChange]
    """The largest difference comes first, in either direction."""
    num_better: int
    num_worse: int
    splits: list[str]
    """Splits that both steps have rollouts of."""
    missing: str | None = None
