"""Who waits for whom: how engine and trainer of one base model spend the time from one training step to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Seconds since the server started the host. A difference of two says what happened between them."""

    at: float
    """The time itself, on a clock that only goes forward."""
    engine_busy_s: float
    """At least one request was computed."""
    engine_asleep_s: float
    closed_s: float
    """Requests were held: the engine slept, or exchanged its weights."""
    held_s: float
    """Waits of held requests, summed over requests."""
    trainer_busy_s: float


def usage_metrics(before: Usage, after: Usage) -> dict[str, float]:
    """Describe the time between two moments, as a rule from the end of one training step to that of the next."""
    seconds = after.at - before.at
    if seconds <= 0:
        return {}
    return {
        "time/since_last_step_s": seconds,
        "time/engine_idle_share": _idle(after.engine_busy_s - before.engine_busy_s, seconds),
        "time/trainer_idle_share": _idle(after.trainer_busy_s - before.trainer_busy_s, seconds),
        "time/engine_asleep_s": after.engine_asleep_s - before.engine_asleep_s,
        "time/requests_closed_s": after.closed_s - before.closed_s,
        "time/requests_held_s": after.held_s - before.held_s,
    }


def _idle(busy_s: float, seconds: float) -> float:
    return min(1.0, max(0.0, 1 - busy_s / seconds))
