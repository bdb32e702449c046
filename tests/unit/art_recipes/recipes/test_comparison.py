"""Two checkpoints on the same scenarios: one question to the judge for each, and nobody's fault becomes a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest

from art.errors import FaultRateError, JudgeError, ToolServerError
from art.model import TrainableModel
from art.rewards import GroupScorer, Judgement, Verdict
from art.rewards.evidence import evidence_of
from art.task import Scenario, Split, Task
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.training.comparison import CHECKPOINT, compare_checkpoints

NOBODY = cast("TrainableModel[Any, Any]", None)


class Words(Task):
    """A policy that says more with every step; `broken` are (scenario, step, rollout index) that fail."""

    name: ClassVar[str] = "words"
    description: ClassVar[str] = "say more"

    def __init__(self, broken: Sequence[tuple[int, int, int]] = ()) -> None:
        self.broken = set(broken)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"number": index}) for index in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        assert step is not None
        number = scenario.inputs["number"]
        if (number, step, rollout_index) in self.broken:
            raise ToolServerError("gone")
        said = f"scenario {number}, rollout {rollout_index}, words: {step}"
        return Trajectory(
            messages_and_choices=[{"role": "user", "content": "speak"}, {"role": "assistant", "content": said}]
        )


class Judge:
    """Scores the number of words, relative to the most words of the group; may refuse a scenario."""

    name = "words"

    def __init__(self, refuses: str = "none") -> None:
        self.refuses = refuses
        self.groups: list[TrajectoryGroup] = []

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        self.groups.append(group)
        texts = [str(trajectory.messages()[-1]["content"]) for trajectory in group]  # type: ignore[typeddict-item]
        if any(self.refuses in text for text in texts):
            raise JudgeError("down")
        words = [int(text.rpartition(" ")[2]) for text in texts]
        return Judgement(verdicts=[Verdict(score=count / max(words)) for count in words])


async def compare(task: Words, judge: Judge, *, count: int = 3, **settings: Any) -> Any:
    scenarios = task.scenarios("test", seed=0, count=count)
    return await compare_checkpoints(
        NOBODY, task, scenarios, before=2, after=8, rollouts=2, score=GroupScorer(judge), **settings
    )


async def test_both_checkpoints_are_judged_in_one_question() -> None:
    judge = Judge()
    comparison = await compare(Words(), judge)
    assert [len(group) for group in judge.groups] == [4, 4, 4]
    assert [item.scenario.inputs["number"] for item in comparison.compared] == [0, 1, 2]
    for item in comparison.compared:
        assert (item.before_score, item.after_score) == (0.25, 1.0)
        assert [t.metadata[CHECKPOINT] for t in (*item.before, *item.after)] == [2, 2, 8, 8]
    assert (comparison.num_left_out, comparison.num_failed_rollouts) == (0, 0)


async def test_the_judge_is_not_told_which_is_which() -> None:
    judge = Judge()
    await compare(Words(), judge)
    for group in judge.groups:
        for trajectory in group:
            assert CHECKPOINT not in str(evidence_of(trajectory))


async def test_a_scenario_without_scores_is_left_out_and_counted() -> None:
    comparison = await compare(Words(), Judge(refuses="scenario 1,"))
    assert [item.scenario.inputs["number"] for item in comparison.compared] == [0, 2]
    assert comparison.num_left_out == 1


async def test_failed_rollouts_are_no_scores() -> None:
    task = Words(broken=[(0, 2, 0), (1, 8, 0), (1, 8, 1)])
    comparison = await compare(task, Judge())
    first, last = comparison.compared
    assert (first.scenario.inputs["number"], len(first.before), len(first.after)) == (0, 1, 2)
    assert first.before_score == 0.25, "the mean of what there is"
    assert last.scenario.inputs["number"] == 2, "one without a rollout after training says nothing"
    assert (comparison.num_left_out, comparison.num_failed_rollouts) == (1, 3)
    everywhere = Words(broken=[(number, step, index) for number in range(3) for step in (2, 8) for index in (0, 1)])
    with pytest.raises(FaultRateError, match="gone"):
        await compare(everywhere, Judge())
