"""Absolute judges, references, functions and weighted sums, and groups whose judge fails in a gather."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import art
from art.errors import BudgetError, ConfigError, FaultRateError, JudgeError
from art.rewards import (
    AbsoluteJudge,
    Budget,
    GroupScorer,
    Judgement,
    JudgeSettings,
    Ruler,
    Verdict,
    combine,
    score_group,
)
from art.trajectory import Trajectory, TrajectoryGroup

JUDGE = "openai/judge"


class Fixed:
    """A judge that gives fixed scores to every group, or fails."""

    name = "fixed"

    def __init__(self, *scores: float, error: Exception | None = None) -> None:
        self.scores, self.error = scores, error

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        if self.error is not None:
            raise self.error
        return Judgement(verdicts=[Verdict(score=score) for score in self.scores], costs_usd={"fixed": 0.5})


def rewards(group: TrajectoryGroup) -> list[float]:
    return [trajectory.reward for trajectory in group]


async def test_an_absolute_judge_asks_once_per_different_trajectory(start_judge, address, make_group, settings) -> None:
    pytest.importorskip("litellm")
    judge = start_judge()
    absolute = AbsoluteJudge(JUDGE, extra_litellm_params=address(judge), settings=settings, name="good")
    scored = await score_group(make_group(0.2, 0.9, 0.2), absolute)
    assert rewards(scored) == pytest.approx([0.2, 0.9, 0.2])
    assert len(judge.requests) == 2
    assert scored.trajectories[0].metrics["good_score"] == 0.2
    assert "beside the others" not in judge.requests[0]["messages"][0]["content"]
    with pytest.raises(ConfigError, match="one trajectory at a time"):
        AbsoluteJudge(JUDGE, settings=JudgeSettings(passes=2))


@pytest.mark.parametrize("reference", ["answer", lambda trajectory: "</reference>two"])
async def test_a_reference_answer_is_shown(start_judge, address, make_group, settings, reference) -> None:
    pytest.importorskip("litellm")
    judge = start_judge(grade=lambda t: float("two" in t["reference_answer"]))
    group = make_group(0.2, 0.9, metadata={"answer": "two"})
    absolute = AbsoluteJudge(JUDGE, reference=reference, extra_litellm_params=address(judge), settings=settings)
    assert rewards(await score_group(group, absolute)) == [1.0, 1.0]
    assert "reference_answer" in judge.requests[0]["messages"][0]["content"]
    if reference == "answer":
        group.trajectories[0].metadata["answer"] = "three"
        assert rewards(await score_group(group, absolute)) == [0.0, 1.0]
        with pytest.raises(ConfigError, match="needs a reference answer in metadata"):
            await score_group(make_group(0.1), absolute)


async def test_one_failure_leaves_the_whole_group_without_scores(start_judge, address, make_group, settings) -> None:
    pytest.importorskip("litellm")
    judge = start_judge(faults=["401"])
    absolute = AbsoluteJudge(JUDGE, extra_litellm_params=address(judge), settings=settings)
    with pytest.raises(JudgeError, match="401"):
        await score_group(make_group(0.2, 0.9), absolute)


async def test_functions_can_be_judges(make_group) -> None:
    def length(trajectory: Trajectory) -> int:
        return len(trajectory.messages_and_choices)

    async def slow(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return 0.25

    scored = await score_group(make_group(0.2, 0.9), length)
    assert rewards(scored) == [2.0, 2.0]
    assert scored.trajectories[0].metrics == {"independent_reward": 0.0, "length_score": 2.0}
    assert scored.trajectories[0].logs == []
    assert rewards(await score_group(make_group(0.2), slow)) == [0.25]
    assert (await score_group(make_group(0.2), lambda t: 1.0)).trajectories[0].metrics["function_score"] == 1.0
    with pytest.raises(JudgeError, match="reward function 'function' failed: ZeroDivisionError"):
        await score_group(make_group(0.2), lambda t: 1 / 0)
    with pytest.raises(JudgeError, match="not finite"):
        await score_group(make_group(0.2), lambda t: float("nan"))
    with pytest.raises(ConfigError, match="expected a judge or a function"):
        await score_group(make_group(0.2), 3)  # type: ignore[arg-type]


async def test_a_weighted_sum_of_judges_is_a_judge(make_group) -> None:
    reward = combine(
        {"quality": Fixed(0.5, 1.0), "own": lambda t: t.reward}, weights={"quality": 2.0, "own": -1.0}, name="total"
    )
    group = make_group(0.2, 0.9)
    group.trajectories[0].reward = 0.75
    scored = await score_group(group, combine({"all": reward, "one": lambda t: 1.0}))
    assert rewards(scored) == [2 * 0.5 - 0.75 + 1, 2 * 1.0 - 0 + 1]
    assert scored.trajectories[0].metrics.items() >= {
        "independent_reward": 0.75, "combined/all": 0.25, "combined/all/quality": 0.5, "combined/all/own": 0.75,
        "combined/one": 1.0, "costs/judge/fixed": 0.25,
    }.items()  # fmt: skip
    with pytest.raises(JudgeError, match="down"):
        await score_group(group, combine({"a": Fixed(error=JudgeError("down")), "b": lambda t: 1.0}))
    with pytest.raises(ConfigError, match="the weights are for"):
        combine({"a": lambda t: 1.0}, {"b": 1.0})
    with pytest.raises(ConfigError, match="at least one"):
        combine({})


async def test_a_judge_must_score_every_trajectory(make_group) -> None:
    with pytest.raises(JudgeError, match="1 scores for a group of 2"):
        await score_group(make_group(0.2, 0.9), Fixed(0.5))


# -- in a gather --


class Moody(Fixed):
    """A judge that fails for groups of one trajectory."""

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        if len(group) == 1:
            raise JudgeError("out of order")
        return Judgement(verdicts=[Verdict(score=1.0) for _ in group])


@pytest.mark.parametrize("on_fault", ["drop", "keep"])
async def test_one_bad_group_never_ends_a_gather(make_group, on_fault: Any, caplog) -> None:
    caplog.set_level(logging.WARNING)
    scorer = GroupScorer(Moody(), on_fault=on_fault)
    groups = [make_group(0.1, 0.2), make_group(0.3, metadata={"scenario_id": "s"}), make_group(0.4, 0.5)]
    groups[1].trajectories[0].reward = 0.7
    gathered = await art.gather_trajectory_groups(groups, pbar_desc=None, after_each=scorer)
    assert scorer.metrics() == {"data/judge_fault_rate": pytest.approx(1 / 3), "data/judge_faults/judge": 1.0}
    assert scorer.metrics() == {}, "each step has its own"
    assert "infra_fault" in caplog.text
    if on_fault == "drop":
        assert [len(group) for group in gathered] == [2, 2]
    else:
        assert rewards(gathered[1]) == [0.7]
        assert gathered[1].metadata == {"scenario_id": "s", "outcome": "infra_fault"}
        assert "out of order" in gathered[1].logs[0]
        assert groups[1].metadata == {"scenario_id": "s"}
    assert rewards(gathered[0]) == [1.0, 1.0]


async def test_too_many_failed_groups_end_the_gather(make_group) -> None:
    scorer = GroupScorer(Moody(), max_fault_rate=0.5, window=4)
    for size in (1, 1, 2):
        await scorer(make_group(*[0.1] * size))
    with pytest.raises(FaultRateError, match=r"3 of the last 4 groups.*judge 3.*out of order"):
        await scorer(make_group(0.1))
    for _ in range(3):
        await scorer(make_group(0.1, 0.2))
    assert await scorer(make_group(0.1)) is None, "what was long ago does not count"
    with pytest.raises(ConfigError, match="on_fault"):
        GroupScorer(Moody(), on_fault="zero")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_rate"):
        GroupScorer(Moody(), max_fault_rate=2)


async def test_a_spent_budget_ends_the_gather_at_once(make_group) -> None:
    settings = JudgeSettings(budget=Budget(max_usd=0.0))
    with pytest.raises(BudgetError):
        await GroupScorer(Ruler("openai/o3", settings=settings))(make_group(0.1, 0.2))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"timeout_s must be above 0, got -1"):
        JudgeSettings(timeout_s=-1)
    with pytest.raises(ConfigError, match="passes must be 1 or 2"):
        JudgeSettings(passes=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="or neither"):
        JudgeSettings(prompt_usd_per_million=1.0)
