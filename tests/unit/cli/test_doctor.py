"""What `art doctor` makes of rollouts and measurements. The command as a program: tests/e2e/test_doctor_command.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from art.cli.doctor import (
    RolledOut,
    _in_view_of,
    check_rollouts,
    check_scores,
    check_spread,
    duration,
    forecast,
    make_scorer,
    roll_out,
    run,
    scored,
)
from art.cli.main import build_parser
from art.costs import Ledger
from art.errors import ConfigError
from art.protocol.preflight import CheckResult
from art.task import Scenario, get_task
from art.tasks.chat_rubric import ChatRubric
from art.testing.judge import ScriptedJudge, grade_messages
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


def test_a_task_that_needs_no_reading_is_not_warned_of_answers_that_depend_on_nothing() -> None:
    check = CheckResult(name="observations", status="warning", found="0.01 nats", remedy="teach it")
    assert _in_view_of(get_task("tic_tac_toe"), check) == check
    found = "0.01 nats. They need not: yes_no_maybe can be learnt without reading"
    assert _in_view_of(get_task("yes_no_maybe"), check) == CheckResult(name="observations", status="ok", found=found)
    other = CheckResult(name="forecast", status="warning", found="long")
    assert _in_view_of(get_task("yes_no_maybe"), other) == other


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
    ("options", "message"),
    [
        (["./tiny", "--task", "chat_rubric"], "say who judges by --judge MODEL, e.g. openai/o3, in `art train` or `art doctor`"),
        (["./tiny", "--judge", "openai/o3"], "--judge scores the rollouts of a task; say which by --task"),
        (["chat_rubric"], "'chat_rubric' is a task, and expected is a base model: art doctor MODEL --task chat_rubric"),
    ],
)  # fmt: skip
def test_a_judge_that_is_missing_or_has_nothing_to_judge(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    args = build_parser(["doctor"]).parse_args(["doctor", *options])
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(args)


class OneModel:
    """What `roll_out` needs of a model, with rollouts by the task below."""

    base_path = "."
    costs = Ledger()


class Letters(ChatRubric):
    """Rollouts without a model: the better the answer, the higher its index."""

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        name, gift = scenario.inputs["input"].rstrip(".").split()[1::3]
        answer = [f"Thanks, {name}!", f"{name}, thanks for the {gift}."][rollout_index]
        said = [*self.opening(scenario), {"role": "assistant", "content": answer}]
        return Trajectory(messages_and_choices=said)


async def test_the_judge_scores_the_trial_rollouts(tmp_path: Path) -> None:
    task: Any = Letters(prompts="sample")
    words = ["doctor", "./tiny", "--task", "chat_rubric", "--judge", "openai/judge", "--judge-url"]
    model: Any = OneModel()

    async def checked(judge: ScriptedJudge) -> tuple[CheckResult, CheckResult]:
        args = build_parser(words).parse_args([*words, judge.base_url])
        score = make_scorer(args, task, model, tmp_path)
        rolled = await roll_out(model, task, num_scenarios=3, num_rollouts=2, seed=0, score=score)
        assert check_rollouts(rolled).status == "ok"
        return check_scores(rolled.groups), check_spread(scored(rolled.groups))

    with ScriptedJudge(grade_messages(task.score_messages), always="401") as judge:
        unscored, spread = await checked(judge)
    assert (unscored.status, spread.status) == ("failure", "failure")
    assert "0 of 3 groups were scored; no scores" in unscored.found
    with ScriptedJudge(grade_messages(task.score_messages)) as judge:
        all_scored, spread = await checked(judge)
    assert (all_scored.status, all_scored.found) == ("ok", "3 of 3 groups were scored")
    assert (spread.status, spread.measured["mean_reward"]) == ("ok", pytest.approx(0.35))


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.04, "5.0 s"), (90, "1.5 min"), (5400, "1.5 h"), (129_600, "1.5 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
