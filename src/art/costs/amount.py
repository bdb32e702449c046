"""How much of something was used, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A sum of bookings."""

    usd: float = 0.0
    """Of those whose price is known."""
    priced: int = 0
    """How many those are."""
    unpriced: int = 0
    """How many have a price that nobody knows."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that had been computed before."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """Of a device."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def to_row(self) -> dict[str, Any]:
        """What is not 0, for JSON."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Amount:
        """Of a line of JSON; what else is in it is passed over."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    def tokens(self) -> dict[str, int]:
        """By kind, without zeros."""
        kinds = {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "completion": self.completion_tokens}
        return {kind: count for kind, count in kinds.items() if count}
