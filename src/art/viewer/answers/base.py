"""The base of all answers and queries of the page, and types that several views share.

Times are seconds since the epoch. Numbers that are NaN or infinite are null.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base class of all answers."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Query(BaseModel):
    """Base class of queries. Values may be texts, as a URL has them; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Indexing(Answer):
    """How far the index of rollouts has got. Until it is complete, lists and totals have only what is indexed."""

    done_bytes: int
    """Size of what was read from the files."""
    total_bytes: int
    """Size of the files."""


class Interval(Answer):
    """A mean and its 95 % interval; the ends are null where there are too few values to tell."""

    mean: float
    low: float | None = None
    high: float | None = None
    num: int
    """Number of independent values: groups, where rollouts of one scenario are grouped, else rollouts or rows."""
