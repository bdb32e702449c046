"""Which models a chart shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkModelKey:
    """A model in a chart: what it is called there, and which split of it counts."""

    name: str
    display_name: str | None = None
    split: str | None = None
    """`None` shows all splits together."""

    def __str__(self) -> str:
        return self.display_name or self.name
