"""`ModelComparison`: the result of `art compare`, as its JSON file has it (docs/compare.md describes each key), and
its table for people.

A number that is not known is null, never 0: a price that nobody gave, tokens that a server did not report, the score of
a model that answered nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from art.metrics.scores import Score
from art.storage.atomic import write_file

SCHEMA_VERSION = 1
ModelKind = Literal["endpoint", "checkpoint", "local", "scripted"]
ModelState = Literal["waiting", "running", "done", "gave_up"]


class _Part(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="null", use_attribute_docstrings=True)


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
    difference: Score | None = None
    """Headline metric minus that of the reference, on the scenarios that both have; null for the reference itself."""
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


JSON_FILE = "comparison.json"
UNKNOWN = "-"
SCORE_COLUMNS = 5
"""Number of columns after the model's name that say how good, fast and dear it is; the others say what it did."""


def write_comparison(folder: Path, comparison: ModelComparison) -> None:
    """Write `comparison.json` into a folder, which is made if it is missing.

    Raises:
        StorageError: writing failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / JSON_FILE, (comparison.model_dump_json(indent=2) + "\n").encode())


def read_comparison(folder: Path) -> ModelComparison:
    """Read the comparison in a folder.

    Raises:
        OSError, ValueError: there is none, or it is of another version.
    """
    return ModelComparison.model_validate_json((folder / JSON_FILE).read_bytes())


def columns(comparison: ModelComparison) -> list[str]:
    """Return the headings of the table."""
    metric = comparison.headline_metric
    return [
        "model", f"{metric} (95 %)", f"against {comparison.reference}", "scenarios", "s per rollout", "USD per 1,000",
        "reward", "policy faults", "turns", "s per turn", "tokens in / out", "failed calls",
    ]  # fmt: skip


def cells(comparison: ModelComparison, row: ModelRow) -> list[str]:
    """Return a model's row of the table. What is not known is `-`."""
    turn_s, rollout_s = [
        UNKNOWN if time is None else f"{seconds(time.median)}, p95 {seconds(time.p95)}"
        for time in (row.turn_latency_s, row.rollout_latency_s)
    ]
    tokens = UNKNOWN
    if row.prompt_tokens is not None and row.completion_tokens is not None:
        tokens = f"{row.prompt_tokens:,.0f} / {row.completion_tokens:,.0f}"
    faults = UNKNOWN if row.policy_fault_rate is None else f"{row.policy_fault_rate:.0%}"
    turns = UNKNOWN if row.turns is None else f"{row.turns:.1f}"
    score, num = ("no score", 0) if row.headline is None else (row.headline.text(), row.headline.num)
    difference = "reference" if row.label == comparison.reference else UNKNOWN
    if row.difference is not None:
        note = "" if row.difference.num == comparison.num_scenarios else f", {row.difference.num} pairs"
        difference = row.difference.text(sign=True) + note
    calls = row.calls
    failed = UNKNOWN if calls is None or not calls.num_calls else f"{calls.num_failed} of {calls.num_calls}"
    return [
        row.label, score, difference, f"{num} of {comparison.num_scenarios}", rollout_s, price(row),
        UNKNOWN if row.reward is None else row.reward.text(), faults, turns, turn_s, tokens, failed,
    ]  # fmt: skip


def price(row: ModelRow) -> str:
    """Write what 1,000 rollouts cost, or why that is not known."""
    if row.usd_per_1000 is None:
        return "no price" if row.price_note in (None, "no price") else UNKNOWN
    return f"{row.usd_per_1000:,.4f}" if row.usd_per_1000 < 1 else f"{row.usd_per_1000:,.2f}"


def seconds(value: float) -> str:
    """Write a time with two digits that count, e.g. `0.0041`, `0.25`, `12`."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"


def remarks(comparison: ModelComparison) -> list[str]:
    """Say what the table alone would hide: models without a score, missing rollouts, cut answers, unknown prices."""
    lines = [f"{row.label}: {text}" for row in comparison.models for text in _remarks(row)]
    if not comparison.is_complete:
        lines.append("The comparison is not complete; the same command goes on.")
    return lines


def _remarks(row: ModelRow) -> list[str]:
    texts = []
    if row.state == "gave_up":
        texts.append(f"given up with {row.num_rollouts_left} rollouts left to make")
    if row.num_rollouts == 0 and row.problem:
        texts.append(f"no score, because no rollout worked: {row.problem}")
    elif row.num_failed_rollouts:
        rollouts = "1 rollout failed and has" if row.num_failed_rollouts == 1 else (
            f"{row.num_failed_rollouts} rollouts failed and have"
        )  # fmt: skip
        texts.append(f"{rollouts} no score, the last error: {row.problem}")
    if row.calls is None:
        return texts
    if row.calls.faults:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row.calls.faults.items()))
        texts.append(f"failed requests by kind: {kinds}")
    if row.calls.num_rate_limited:
        texts.append(f"the server limited the rate {row.calls.num_rate_limited} times; rollout times have the waits")
    answered = max(1, row.calls.num_answered)
    if row.calls.num_cut:
        share = row.calls.num_cut / answered
        texts.append(f"{share:.0%} of the answers were cut at their limit of tokens; --max-tokens raises it")
    if row.calls.num_without_usage:
        texts.append(f"the server reported no tokens for {row.calls.num_without_usage} of {answered} answers")
    return texts


def heading(comparison: ModelComparison) -> str:
    """Say in a sentence or two what was compared."""
    rollouts = "" if comparison.rollouts_per_scenario == 1 else f", {comparison.rollouts_per_scenario} rollouts each"
    return (
        f"{comparison.description}: {comparison.num_scenarios} scenarios of the split {comparison.split}, seed "
        f"{comparison.seed}{rollouts}. {comparison.num_common} of them have a score with every model that has any. "
        f"Up to {comparison.concurrency} rollouts at once."
    )
