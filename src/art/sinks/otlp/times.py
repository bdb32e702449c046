"""When the requests and tool calls of a rollout happened.

A choice that our server sampled names the start and end of its request. Nothing else in a log has times of its own:
- A choice of another endpoint shares the gap between its neighbours evenly with other choices of that kind.
- A tool call fills the gap between the answer that asked for it and the next request.
Both are marked as estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.trajectory import Trajectory, finite_number

_SANE = (0.0, 9e9)
"""Seconds since the epoch that a log can name, 1970 to 2255. Other numbers count as unknown."""


@dataclass(frozen=True, slots=True)
class Period:
    """A start and an end, in seconds since the epoch."""

    start: float
    end: float
    is_estimated: bool = False


def recorded_period(choice: Any) -> Period | None:
    """Return when the request of a choice ran, as our server noted it; `None` if the choice does not say."""
    exchange = getattr(choice, "exchange", None)
    if not isinstance(exchange, Mapping):
        return None
    start, end = _seconds(exchange.get("started_at")), _seconds(exchange.get("ended_at"))
    return None if start is None or end is None or end < start else Period(start, end)


def rollout_period(trajectory: Trajectory, choices: Sequence[Any]) -> Period:
    """Return the period of a whole rollout.

    It begins at `start_time` and lasts for `metrics["duration"]`, and is longer if requests ran outside of that: the
    server's clock may differ, and a trajectory may be made at the end of a rollout. Without `duration` it ends with
    the last request, and the end is estimated.
    """
    known = [period for choice in choices if (period := recorded_period(choice)) is not None]
    begun = _seconds(trajectory.start_time.timestamp())
    start = begun if begun is not None else min((period.start for period in known), default=0.0)
    duration = finite_number(trajectory.metrics.get("duration"))
    ended = None if begun is None or duration is None or duration < 0 else _seconds(start + duration)
    end = max([start if ended is None else ended, *(period.end for period in known)])
    return Period(min([start, *(period.start for period in known)]), end, is_estimated=ended is None)


def choice_periods(choices: Sequence[Any], rollout: Period) -> list[Period]:
    """Return the period of each choice of one conversation, in their order."""
    known = [recorded_period(choice) for choice in choices]
    periods: list[Period] = []
    for i, period in enumerate(known):
        periods.append(_between(known, i, periods, rollout) if period is None else period)
    return periods


def _between(known: Sequence[Period | None], i: int, before: Sequence[Period], rollout: Period) -> Period:
    """Give choice `i` its share of the time between the choice before it and the next one whose time is known."""
    left = before[-1].end if before else rollout.start
    following = next((k for k in range(i, len(known)) if known[k] is not None), len(known))
    next_known = known[following] if following < len(known) else None
    right = rollout.end if next_known is None else next_known.start
    end = left + max(0.0, right - left) / (following - i)
    return Period(left, end, is_estimated=True)


def tool_period(answered: Period, next_request: Period | None, rollout: Period) -> Period:
    """Return the period of the tool calls of an answer: all of them end at the latest when the next request begins."""
    end = rollout.end if next_request is None else next_request.start
    return Period(answered.end, max(answered.end, end), is_estimated=True)


def _seconds(value: Any) -> float | None:
    number = finite_number(value)
    return number if number is not None and _SANE[0] <= number <= _SANE[1] else None
