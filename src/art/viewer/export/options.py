"""What an export contains: which runs, steps and rollouts, and how much of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from art.errors import ConfigError

MAX_RUNS = 10
MAX_STEP_DETAILS = 300
"""Steps of which the numbers (metrics, ledger, findings) are exported; with more, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Choices for an export. What is left out is counted, and said in the page and by the command."""

    runs: tuple[tuple[str, str], ...] = ()
    """Project and name of each run; none means the newest `MAX_RUNS`."""
    steps: tuple[tuple[int, int], ...] | None = None
    """Ranges of steps whose rollouts are exported, ends included. `None`: the first, the newest, and evenly spaced ones
    between them, `num_steps` in all."""
    num_steps: int = 12
    num_rollouts: int = 64
    """Rollouts of each split and step, by whole groups."""
    num_tokens: int = 16
    """Rollouts of each split and step that have their exact tokens."""
    max_bytes: int = 100 * 2**20
    """Size of the rollouts' files before compression. The newest steps come first; what is above it is left out."""


def choose_steps(steps: Sequence[int], options: ExportOptions) -> list[int]:
    """Choose the steps whose rollouts are exported, of those that have any."""
    if options.steps is not None:
        return [step for step in steps if any(first <= step <= last for first, last in options.steps)]
    return spread(steps, options.num_steps)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Choose at most `count` of the steps: the first, the last and evenly spaced ones between them."""
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ranges of steps: `parse_ranges("1-10,50")` is `((1, 10), (50, 50))`.

    Raises:
        ConfigError: the text has another form.
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ConfigError(f"--steps takes steps and ranges of steps, e.g. `1-10,50`; got {text!r}")
        ranges.append((int(first), int(last) if dash else int(first)))
    return tuple(ranges)
