"""Curves of metrics over steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from art.viewer.answers.base import Answer, Query


class SeriesQuery(Query):
    """Which curves to draw."""

    metric: Annotated[list[str], Field(max_length=64)] = []
    """Names of metrics, e.g. `train/reward`."""
    max_points: int = Field(default=600, ge=2, le=5000)
    """Largest number of points per curve. With more steps, neighbouring steps are averaged."""
    first: int | None = None
    last: int | None = None
    """First and last step; null for no bound."""


class Series(Answer):
    """One metric over steps. All lists have one entry per point.

    A point of one step has the mean of its rows in `history.jsonl`. Where the curve has more steps than points, a point
    is the mean of consecutive steps, `steps` has the middle one, and `num_steps` says how many it joins.
    """

    metric: str
    split: str | None
    """First part of the metric's name, where it is the split of rollouts: `train`, `val` ..."""
    steps: list[int]
    mean: list[float]
    low: list[float | None] | None
    high: list[float | None] | None
    """95 % interval of the mean over groups, or rollouts without a group; null where rollouts have no such value."""
    num: list[int | None] | None
    """Number of rollouts with a value."""
    num_steps: list[int] | None
    """Number of steps that each point joins; null if each point is one step."""


class SeriesAnswer(Answer):
    series: list[Series]
    """In the order of the query; a metric without values has empty lists."""
    num_unreadable_lines: int
    """Damaged lines of `history.jsonl`, which were skipped."""
