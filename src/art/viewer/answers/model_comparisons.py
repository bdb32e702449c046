"""Comparisons of models that `art compare` has made in the data directory."""

from __future__ import annotations

from art.report.model_comparison import ModelComparison
from art.viewer.answers.base import Answer


class ComparisonLine(Answer):
    """One comparison in a line."""

    id: str
    task: str
    description: str
    models: list[str]
    best: str | None
    """The model with the highest headline metric; null if none has a score."""
    headline_metric: str
    num_scenarios: int
    updated_at: float
    is_complete: bool


class ComparisonList(Answer):
    comparisons: list[ComparisonLine]
    """The newest first."""
    unreadable: list[str]
    """Folders whose file is damaged, or of another version."""


class ComparisonAnswer(Answer):
    """One comparison with all its numbers."""

    comparison: ModelComparison
    remarks: list[str]
    """What the numbers alone would hide, one sentence each."""
