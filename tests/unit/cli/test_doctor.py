"""What `art doctor` makes of rollouts and measurements. The command as a program: tests/e2e/test_doctor_command.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from art.cli.main import build_parser
from art.costs import Ledger
from art.errors import ConfigError
from art.protocol.training import CheckResult
from art.task import Scenario
from art.testing.judge import ScriptedJudge, grade_messages
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.doctor_command import check_rollouts, check_scores, check_spread, make_scorer, roll_out, run
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
        args = build_parser(words).parse_args([*words, judge.base_url, "--scenarios", "3", "--rollouts", "2"])
        groups, check = await roll_out(args, task, model, make_scorer(args, task, model, tmp_path))
        assert check.status == "ok"
        return check_scores(groups), check_spread(groups)

    with ScriptedJudge(grade_messages(task.score_messages), always="401") as judge:
        unscored, spread = await checked(judge)
    assert (unscored.status, spread.status) == ("failure", "failure")
    assert "0 of 3 groups were scored; no scores" in unscored.found
    with ScriptedJudge(grade_messages(task.score_messages)) as judge:
        all_scored, spread = await checked(judge)
    assert (all_scored.status, all_scored.found) == ("ok", "3 of 3 groups were scored")
    assert (spread.status, spread.measured["mean_reward"]) == ("ok", pytest.approx(0.35))
