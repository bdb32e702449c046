"""Forecast which `max_staleness` is fastest, from a few measured rollouts and the time of a training step.

The measured rollouts are drawn again and again (bootstrap): each draw is a set of rollouts that could have been
measured as well, and gives one simulated run for each staleness, with the same latencies. The range over the draws
shows what few measurements leave open, and the luck of a run. It knows nothing of rollouts that take longer than any
measured one; asynchronous training gains more from these than the forecast says.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from art.asynchronous.simulation.machine import Machine
from art.asynchronous.simulation.simulate import Schedule, Simulated, simulate
from art.asynchronous.simulation.workload import RolloutTurns, resampled
from art.errors import ConfigError

STALENESS = (0, 1, 2, 4)
"""Values of `max_staleness` that are compared. 0 is the synchronous loop; above 4 a loss needs a trust region."""
NUM_DRAWS = 20
NUM_STEPS = 10
"""Steps of a simulated run. The first and the last are not overlapped, so longer runs gain a little more."""
WORTH = 1.1
"""A larger staleness is advised if it makes the run this many times faster than the next smaller one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Median and the range that holds 90 % of the draws."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Describe at least one value."""
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(median=statistics.median(ordered), low=ordered[round(0.05 * last)], high=ordered[round(0.95 * last)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceForecast:
    """How fast a training would be with one `max_staleness`."""

    max_staleness: int
    step_s: Range
    """Seconds of a step, from one checkpoint to the next."""
    speedup: Range
    """How many times faster the training is than the synchronous one on the same rollouts."""
    engine_idle_share: float
    trainer_idle_share: float
    """Share of the time in which engine and trainer have nothing to do, on average."""


def forecast_pace(
    rollouts: Sequence[RolloutTurns],
    machine: Machine,
    *,
    groups_per_step: int,
    rollouts_per_group: int,
    seed: int = 0,
) -> list[PaceForecast]:
    """Forecast the speed of a training for each `max_staleness` of 0, 1, 2 and 4.

    Example: answers of 0.3 s, tools of a second but now and then half a minute, and a training step of 4 s
        rollouts = [[Turn(engine_s=0.3, tool_s=tool_s)] for tool_s in (0.8, 1.0, 1.3, 30.0)]
        forecast = forecast_pace(rollouts, Machine(train_s=4.0), groups_per_step=8, rollouts_per_group=8)

    Args:
        rollouts: measured rollouts, the more the better.
        machine: the engine, and the seconds of a training step of this size.

    Raises:
        ConfigError: no rollout was given.
    """
    if not rollouts:
        raise ConfigError("a forecast needs measured rollouts, got none")
    rng = random.Random(seed)
    runs: dict[int, list[Simulated]] = {staleness: [] for staleness in STALENESS}
    for number in range(NUM_DRAWS):
        workload = resampled(rng.choices(rollouts, k=len(rollouts)), seed=number)
        for staleness in STALENESS:
            schedule = Schedule(
                steps=NUM_STEPS, groups_per_step=groups_per_step, rollouts_per_group=rollouts_per_group,
                max_staleness=staleness,
            )  # fmt: skip
            runs[staleness].append(simulate(workload, machine, schedule))
    return [_summary(staleness, runs[staleness], runs[0]) for staleness in STALENESS]


def _summary(staleness: int, runs: Sequence[Simulated], synchronous: Sequence[Simulated]) -> PaceForecast:
    pairs = zip(runs, synchronous, strict=True)
    return PaceForecast(
        max_staleness=staleness,
        step_s=Range.of([run.wall_s / NUM_STEPS for run in runs]),
        speedup=Range.of([plain.wall_s / run.wall_s for run, plain in pairs]),
        engine_idle_share=statistics.fmean(run.engine_idle_share for run in runs),
        trainer_idle_share=statistics.fmean(run.trainer_idle_share for run in runs),
    )


def advised_staleness(forecasts: Sequence[PaceForecast]) -> int:
    """Return the smallest `max_staleness` that a larger one does not beat by a factor of `WORTH`."""
    advised = forecasts[0]
    for forecast in forecasts[1:]:
        if forecast.speedup.median >= WORTH * advised.speedup.median:
            advised = forecast
    return advised.max_staleness
