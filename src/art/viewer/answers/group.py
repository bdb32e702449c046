"""The rollouts of one scenario side by side."""

from __future__ import annotations

from art.viewer.answers.base import Answer
from art.viewer.answers.rollout import Judgement, RolloutDetail


class GroupAnswer(Answer):
    split: str
    step: int
    group: int
    scenario: str | None
    rollouts: list[RolloutDetail]
    """The highest advantage comes first; by reward where no advantage is known. At most 64."""
    num_rollouts: int
    metrics: dict[str, float | None]
    logs: list[str]
    judges: list[Judgement]
    """The judgement of the group as a whole, one per judge: its mean score and disagreement with itself."""
    dropped_because: str | None
    """Why the group was not trained; null if it was, or if that is not known."""
    missing: str | None = None
