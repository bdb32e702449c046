"""What a run has cost."""

from __future__ import annotations

from art.viewer.answers.base import Answer


class SourceCosts(Answer):
    source: str
    usd: float | None
    """Sum of its prices; null if nothing of it had one."""
    num_unpriced: int
    """Number of requests whose price is not known."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class CostsByStep(Answer):
    """Costs of each step. A step that cost nothing is left out."""

    steps: list[int]
    by_source: dict[str, list[float]]
    """USD of each source, one entry per step."""


class CostsAnswer(Answer):
    total_usd: float | None
    """Null if nothing that was booked had a price."""
    by_source: list[SourceCosts]
    """The most expensive first."""
    by_step: CostsByStep
    num_unreadable_lines: int
