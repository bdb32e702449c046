"""The table of rollouts: rows, and the query that filters, sorts and pages them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.viewer.answers.base import Answer, Indexing, Query

Outcome = Literal["ok", "policy_fault", "infra_fault"]
SortKey = Literal["reward", "advantage", "tokens", "turns", "step", "started_at", "duration", "judge_score"]


class RolloutKey(Query):
    """The place of a rollout in a run."""

    split: str
    step: int
    group: int = Field(ge=0)
    """Number of the group in the split and step, in the order of logging, from 0."""
    index: int = Field(ge=0)
    """Place in the group, from 0. Rollouts that failed follow those with a trajectory."""


class Snippet(Answer):
    """The words around the first match of a search."""

    text: str
    start: int
    end: int
    """The match is `text[start:end]`, in characters."""


class RolloutRow(Answer):
    """One rollout in the table."""

    split: str
    step: int
    group: int
    index: int
    scenario: str | None
    """Id of the scenario, from the metadata of the trajectory or group, or the beginning of its first message."""
    reward: float | None
    """Null for a rollout that failed, or whose reward is not a number."""
    advantage: float | None
    """Advantage in training; null where it is not known."""
    num_turns: int
    """Number of sampled answers, in all conversations of the rollout."""
    num_tokens: int | None
    """Number of sampled tokens; null where neither the file nor the record of exchanges has them."""
    stop: str | None
    """Finish reason of the last answer: `stop`, `length`, `tool_calls` ..."""
    outcome: Outcome
    dropped_because: str | None
    """Why the rollout was not trained; null if it was, or if it is not known (`advantage` is then null too)."""
    started_at: float | None
    duration_s: float | None
    policy_version: int | None
    """Step whose weights sampled the first answer."""
    judge_score: float | None
    snippet: Snippet | None = None
    group_rewards: list[float | None] | None = None
    """In a list of rollouts, the rewards of all rollouts of its group by index, at most 32."""
    is_logged: bool = True
    """False for a rollout that was trained and that no script logged; it has what the server's record has."""


class RolloutQuery(Query):
    """Which rollouts to list, and in which order. A bound that is null does not filter."""

    split: str | None = None
    step: int | None = None
    group: int | None = None
    outcome: Outcome | None = None
    stop: str | None = None
    dropped: str | None = None
    """A reason in `dropped_because`; `any` for every rollout that was not trained, `none` for those that were."""
    scenario: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = Field(default=None, max_length=1000)
    """Words that the conversation, logs or judge's explanation must have, all of them. Words in double quotes are a
    phrase; a word that ends in `*` is a prefix. Everything else is text."""
    sort: SortKey = "step"
    descending: bool = True
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1000)


class RolloutPage(Answer):
    rows: list[RolloutRow]
    total: int
    """Number of rollouts that match."""
    is_total_exact: bool
    """False where there may be more: while the index is built, and for a search with a great many matches."""
    indexing: Indexing | None = None
    stops: list[str] = []
    """Finish reasons that the run's rollouts have, for the filter."""
    dropped: list[str] = []
    """Reasons for which rollouts were not trained, for the filter."""
