"""The rollouts of one scenario side by side."""

from __future__ import annotations

from art.viewer.answers.base import Answer
from art.viewer.answers.rollout import Judgement, RolloutDetail


class Difference(Answer):
    """First place where a rollout differs from the best one of its group."""

    item: int
    """Number of the item in the first conversation."""
    char: int
    """Number of the character in the text of the item, after its reasoning and before its tool calls; the length of
    the text if only these differ."""


class GroupAnswer(Answer):
    split: str
    step: int
    group: int
    scenario: str | None
    rollouts: list[RolloutDetail]
    """The highest advantage comes first; by reward where no advantage is known. At most 64."""
    num_rollouts: int
    first_difference: list[Difference | None]
    """One per rollout of `rollouts`; null for the first, and for one that does not differ from it."""
    metrics: dict[str, float | None]
    logs: list[str]
    judges: list[Judgement]
    """The judgement of the group as a whole, one per judge: its mean score and disagreement with itself."""
    dropped_because: str | None
    """Why the group was not trained; null if it was, or if that is not known."""
    missing: str | None = None
