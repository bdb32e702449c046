"""An amount of tokens and time, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The sum of one or more bookings, which are the entries of a `Ledger`."""

    usd: float = 0.0
    """Cost of the bookings whose price is known."""
    priced: int = 0
    """Number of bookings whose price is known."""
    unpriced: int = 0
    """Number of bookings whose price is not known."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens` that came from a prefix cache."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """Device time."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def to_row(self) -> dict[str, Any]:
        """The fields that are not 0, for JSON."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Amount:
        """Make an amount from what `to_row` returned. Unknown keys are ignored."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    def tokens(self) -> dict[str, int]:
        """Token counts by kind, without zeros."""
        kinds = {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "completion": self.completion_tokens}
        return {kind: count for kind, count in kinds.items() if count}
