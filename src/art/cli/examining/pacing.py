"""The check `pacing` of `art doctor`: which `max_staleness` is fastest for this machine and task."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from art.asynchronous.simulation.forecast import STALENESS, PaceForecast, Range, advised_staleness, forecast_pace
from art.asynchronous.simulation.machine import Machine
from art.asynchronous.simulation.workload import RolloutTurns
from art.protocol.preflight import CheckResult
from art.task import TaskDefaults

NAME = "pacing"
_FIGURES = (
    "step_s", "step_s_low", "step_s_high", "speedup", "speedup_low", "speedup_high", "trainer_idle_share",
    "engine_idle_share",
)  # fmt: skip
"""Figures of each `max_staleness` in the check's `measured`."""
FEWEST_ROLLOUTS = 4
"""With fewer measured rollouts there is no forecast."""


def check_pacing(
    rollouts: Sequence[RolloutTurns], machine: Machine, defaults: TaskDefaults, *, seed: int = 0
) -> list[CheckResult]:
    """Forecast the time of a step for each `max_staleness`; no check if too few rollouts were measured."""
    if len(rollouts) < FEWEST_ROLLOUTS:
        return []
    forecasts = forecast_pace(
        rollouts, machine, groups_per_step=defaults.groups_per_step, rollouts_per_group=defaults.rollouts_per_group,
        seed=seed,
    )  # fmt: skip
    advised = advised_staleness(forecasts)
    measured = {"advised_max_staleness": float(advised), "num_rollouts": float(len(rollouts))}
    measured |= {"engine_slowdown": machine.slowdown, "takes_turns": float(machine.alternates)}
    for forecast in forecasts:
        measured |= _figures(forecast)
    return [CheckResult(name=NAME, status="ok", found=_words(forecasts, advised, machine), measured=measured)]


def _figures(forecast: PaceForecast) -> dict[str, float]:
    step_s, speedup = forecast.step_s, forecast.speedup
    figures = (
        step_s.median, step_s.low, step_s.high, speedup.median, speedup.low, speedup.high,
        forecast.trainer_idle_share, forecast.engine_idle_share,
    )  # fmt: skip
    return {f"staleness_{forecast.max_staleness}/{name}": value for name, value in zip(_FIGURES, figures, strict=True)}


def _words(forecasts: Sequence[PaceForecast], advised: int, machine: Machine) -> str:
    plain = forecasts[0]
    best = next(forecast for forecast in forecasts if forecast.max_staleness == advised)
    gain = "would gain less than a tenth" if advised != STALENESS[-1] else "was not simulated"
    speedup = f" ({_shown(best.speedup)} times as fast)" if advised else ""
    turns = "; engine and trainer take turns on this device" if machine.alternates else ""
    return (
        f"a synchronous step takes about {plain.step_s.median:.1f} s, in which the trainer is idle for "
        f"{plain.trainer_idle_share:.0%} and the engine for {plain.engine_idle_share:.0%}{turns}; "
        f"max_staleness={advised} is advised{speedup}, a larger one {gain}"
    )


def _shown(values: Range) -> str:
    return f"{values.median:.2f} ({values.low:.2f} to {values.high:.2f})"


def pacing_table(check: CheckResult) -> Table | None:
    """Make the table of a forecast, with a row for each `max_staleness`; `None` for other checks."""
    if check.name != NAME:
        return None
    names = ("max_staleness", "s per step", "times as fast", "trainer idle", "engine")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title="Pacing forecast (simulated; in brackets 90 % of the simulations)")
    for staleness in STALENESS:
        figures = {name: check.measured[f"staleness_{staleness}/{name}"] for name in _FIGURES}
        speedup = Range(median=figures["speedup"], low=figures["speedup_low"], high=figures["speedup_high"])
        table.add_row(
            str(staleness),
            f"{figures['step_s']:.2f}",
            _shown(speedup),
            f"{figures['trainer_idle_share']:.0%}",
            f"{figures['engine_idle_share']:.0%}",
        )
    return table
