"""What `art doctor` makes of rollouts and measurements. The command as a program: tests/e2e/test_doctor_command.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from art.cli.doctor import RolledOut, check_rollouts, check_spread, duration, forecast
from art.protocol.preflight import CheckResult
from art.task import get_task
from art.trajectory import Trajectory, TrajectoryGroup


def group(*rewards: float, errors: int = 0) -> TrajectoryGroup:
    failed = [RuntimeError("the tool server is down") for _ in range(errors)]
    return TrajectoryGroup([*(Trajectory(reward=reward) for reward in rewards), *failed])


@pytest.mark.parametrize(
    ("groups", "status", "share"),
    [
        ([group(0, 1), group(1, 1)], "ok", 0.5),
        ([group(0, 1), group(1, 1), group(0, 0)], "warning", 2 / 3),
        ([group(1, 1), group(0, 0)], "failure", 1.0),
        ([group(1), group(0)], "failure", 1.0),
        ([group(1, 1 + 1e-9)], "failure", 1.0),
    ],
)
def test_groups_without_spread_are_counted(groups: Sequence[TrajectoryGroup], status: str, share: float) -> None:
    check = check_spread(groups)
    assert check.status == status
    assert check.measured["share_without_spread"] == pytest.approx(share)
    assert (check.remedy is None) == (status == "ok")


def test_no_reward_at_all_is_a_failure() -> None:
    assert check_spread([]).status == "failure"


@pytest.mark.parametrize(
    ("groups", "status"), [([group(0, 1)], "ok"), ([group(1, errors=1)], "warning"), ([group(errors=2)], "failure"), ([], "failure")]
)  # fmt: skip
def test_failed_rollouts_are_counted(groups: list[TrajectoryGroup], status: str) -> None:
    check = check_rollouts(RolledOut(groups=groups, num_rollouts=2, seconds=1.0))
    assert check.status == status
    assert ("RuntimeError: the tool server is down" in check.found) == any(g.exceptions for g in groups)


def test_the_forecast_scales_what_was_measured() -> None:
    task = get_task("yes_no_maybe")  # 16 groups of 8
    rolled = RolledOut(groups=[group(*[0.0] * 8), group(*[1.0] * 8)], num_rollouts=16, seconds=3.0)
    step = CheckResult(name="step", status="ok", found="", measured={"seconds": 0.5})
    check = forecast(task, rolled, step, num_steps=15, price=2.0)
    assert (check.measured["rollout_s"], check.measured["train_s"], check.measured["step_s"]) == (24, 4, 28)
    assert check.measured["cost_per_step"] == pytest.approx(2 * 28 / 3600)
    assert "15 steps 7.0 min and 0.23 at 2 an hour" in check.found
    assert "cost_per_step" not in forecast(task, rolled, step, num_steps=15, price=None).measured


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.04, "5.0 s"), (90, "1.5 min"), (5400, "1.5 h"), (129_600, "1.5 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
