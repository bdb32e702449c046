"""`BenchmarkModelKey`, which says what model a chart shows and how it is labelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkModelKey:
    """A model in a chart: its name, its label, and the split whose trajectories are shown."""

    name: str
    display_name: str | None = None
    split: str | None = None
    """Split to show; `None` shows all splits together."""

    def __str__(self) -> str:
        return self.display_name or self.name
