"""Wire types of the log that a script on another machine sends to its server."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from art.protocol.training import Wire


class LogRequest(Wire):
    """A row of a model's history, and groups that were logged with it. Large ones come in several requests."""

    split: str
    step: int = Field(ge=0)
    row: dict[str, int | float | str | None] = Field(min_length=1)
    """The row as it is in `history.jsonl` of the script. It has the time at which it was written, `recorded_at`."""
    groups: list[dict[str, Any]]
    """Groups as they are in the script's file of the split and step."""


class Logged(Wire):
    num_groups: int
    """Number of groups of the request, all of which are kept now."""
