"""`ModelComparison`: the result of `art compare`, as its JSON file has it (docs/compare.md describes each key).

A number that is not known is null, never 0: a price that nobody gave, tokens that a server did not report, the score of
a model that answered nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from art.report.scores import Score

SCHEMA_VERSION = 1
ModelKind = Literal["endpoint", "checkpoint", "local", "scripted"]
ModelState = Literal["waiting", "running", "done", "gave_up"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null", use_attribute_docstrings=True)


class Quantiles(_Part):
    """The middle and the slow end of some times, in seconds."""

    median: float
    p95: float


class CallCounts(_Part):
    """What became of a model's requests, over all rollouts, also those that failed."""

    num_answered: int = 0
    """Requests with a usable answer."""
    faults: dict[str, int] = Field(default_factory=dict)
    """Requests without one, by kind: `timeout`, `connection`, `unreadable`, `cut_off` (the rollout ended first), or the
    HTTP status. A repeated request counts each time."""
    num_rate_limited: int = 0
    """Requests that the server told to wait (HTTP 429). They were repeated, and are no faults."""
    num_cut: int = 0
    """Answers that ended at their limit of tokens."""
    num_empty: int = 0
    """Answers with neither text nor a tool call."""
    num_without_usage: int = 0
    """Answers whose tokens the server did not report."""

    @property
    def num_failed(self) -> int:
        return sum(self.faults.values())

    @property
    def num_calls(self) -> int:
        return self.num_answered + self.num_failed


class ModelRow(_Part):
    """What one model did on the scenarios of a comparison."""

    label: str
    """Name of the model in this comparison."""
    kind: ModelKind
    where: str
    """Address, checkpoint or folder."""
    state: ModelState
    problem: str | None = None
    """Why rollouts failed, in the words of the last failure; null if none did."""
    num_rollouts: int = 0
    """Rollouts that have a score."""
    num_failed_rollouts: int = 0
    """Rollouts that have none, because the model did not answer. They are left out of every mean."""
    num_rollouts_left: int = 0
    """Rollouts that were not made: the comparison is not complete, or the model was given up."""
    headline: Score | None = None
    """The task's headline metric; null without a scored rollout."""
    reward: Score | None = None
    headline_bounds: tuple[float, float] | None = None
    """Between which values the mean of the headline metric would lie if the rollouts without a score had been made,
    whatever they had given. Only for a metric of 0 and 1, and if rollouts are missing."""
    difference: Score | None = None
    """Headline metric minus that of the reference, on the scenarios that both have; null for the reference itself."""
    reward_difference: Score | None = None
    policy_fault_rate: float | None = None
    """Share of scored rollouts in which the model broke the rules of the task."""
    turns: float | None = None
    """Mean number of answers in a scored rollout."""
    turn_latency_s: Quantiles | None = None
    """Time of an answer: from its request to its last byte, without repetitions and waits before it."""
    rollout_latency_s: Quantiles | None = None
    """Wall time of a scored rollout, with all that happens in it."""
    prompt_tokens: float | None = None
    """Mean prompt tokens of a scored rollout; null if the server did not report them for every answer."""
    completion_tokens: float | None = None
    usd_per_1000: float | None = None
    """Cost of 1,000 scored rollouts in USD, with what failed rollouts cost in between; null if it is not known."""
    price_note: str | None = None
    """Where the price comes from, or why there is none."""
    calls: CallCounts | None = None
    """Null for a model whose requests do not go over HTTP."""


class ModelComparison(_Part):
    """Several models on the same scenarios of a task, with the same random numbers."""

    version: int = SCHEMA_VERSION
    id: str
    """Name of the comparison's folder."""
    task: str
    """Name of the task with the options that differ from its defaults."""
    description: str
    headline_metric: str
    split: str
    seed: int
    num_scenarios: int
    rollouts_per_scenario: int
    reference: str
    """Label of the model that the others are compared with."""
    num_common: int = 0
    """Scenarios that every model with a score has a scored rollout of."""
    concurrency: int
    """Rollouts that ran at once with one model. Latencies depend on it."""
    started_at: float
    """Seconds since the epoch."""
    updated_at: float
    is_complete: bool
    """Whether no rollout is left to make, except of models that were given up."""
    models: list[ModelRow]
    """In the order in which they were named."""

    def row(self, label: str) -> ModelRow:
        """Return the row of a model.

        Raises:
            KeyError: there is no such model.
        """
        for row in self.models:
            if row.label == label:
                return row
        raise KeyError(label)
