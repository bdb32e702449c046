"""What `art doctor` makes of rollouts and measurements. The command as a program: tests/e2e/test_doctor_command.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from art.cli.main import build_parser
from art.errors import ConfigError
from art.task import Scenario
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.doctor_command import check_rollouts, check_spread, examine_task, run
from art_tasks.chat_rubric import ChatRubric


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
    check = check_rollouts(groups, 2, 1.0)
    assert check.status == status
    assert ("RuntimeError: the tool server is down" in check.found) == any(g.exceptions for g in groups)


def test_a_task_in_place_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    message = "'chat_rubric' is a task, and expected is a base model: art doctor MODEL --task chat_rubric"
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(build_parser(["doctor"]).parse_args(["doctor", "chat_rubric"]))


async def test_a_task_that_only_a_judge_rewards_has_its_rollouts_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = Letters(prompts="sample")
    args = build_parser(["doctor"]).parse_args(["doctor", "./tiny", "--groups", "3", "--rollouts", "2"])
    nothing: Any = None
    (check,) = await examine_task(args, task, nothing, nothing)
    assert (check.name, check.status) == ("rollouts", "ok")


class Letters(ChatRubric):
    """Rollouts without a model."""

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        return Trajectory(messages_and_choices=[*self.opening(scenario), {"role": "assistant", "content": "Thanks!"}])
