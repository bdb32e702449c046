"""Forecasts of the fastest staleness, where the answer is known."""

from __future__ import annotations

import pytest

from art.asynchronous.simulation.forecast import advised_staleness, forecast_pace
from art.asynchronous.simulation.machine import Machine
from art.asynchronous.simulation.workload import Turn
from art.errors import ConfigError


def test_equal_rollouts_that_never_wait_gain_little() -> None:
    """Training takes a hundredth of the time, and all rollouts end at once: there is nothing to overlap."""
    rollouts = [[Turn(engine_s=1.0)]] * 8
    forecasts = forecast_pace(rollouts, Machine(train_s=0.01, slowdown=1.0), groups_per_step=2, rollouts_per_group=4)
    assert [forecast.max_staleness for forecast in forecasts] == [0, 1, 2, 4]
    assert forecasts[0].step_s.median == pytest.approx(8.01)
    assert forecasts[0].speedup.median == 1
    assert advised_staleness(forecasts) == 0


def test_overlap_alone_needs_a_staleness_of_one() -> None:
    rollouts = [[Turn(engine_s=1.0)]] * 8
    forecasts = forecast_pace(rollouts, Machine(train_s=1.0), groups_per_step=2, rollouts_per_group=4)
    assert forecasts[1].speedup.median == pytest.approx(2, rel=0.1)
    assert forecasts[1].trainer_idle_share < 0.1 < forecasts[0].trainer_idle_share
    assert advised_staleness(forecasts) == 1


def test_slow_rollouts_need_more_and_leave_more_open() -> None:
    rollouts = [[Turn(engine_s=0.2, tool_s=20.0 if i == 0 else 1.0)] for i in range(32)]
    forecasts = forecast_pace(rollouts, Machine(train_s=1.0), groups_per_step=4, rollouts_per_group=8)
    assert advised_staleness(forecasts) >= 2
    two = forecasts[2].speedup
    assert two.low < two.median < two.high
    assert forecasts == forecast_pace(rollouts, Machine(train_s=1.0), groups_per_step=4, rollouts_per_group=8)


def test_one_device_gains_nothing_from_overlap() -> None:
    rollouts = [[Turn(engine_s=1.0)]] * 8
    machine = Machine(train_s=1.0, alternates=True, slowdown=1.0)
    assert advised_staleness(forecast_pace(rollouts, machine, groups_per_step=2, rollouts_per_group=4)) == 0


def test_without_rollouts_there_is_no_forecast() -> None:
    with pytest.raises(ConfigError, match="needs measured rollouts"):
        forecast_pace([], Machine(train_s=1.0), groups_per_step=2, rollouts_per_group=4)
