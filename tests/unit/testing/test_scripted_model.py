"""A model that a task's scripted player answers, in this process, through the task's own rollout."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import openai
import pytest

import art
from art.errors import ConfigError
from art.task import Player, Scenario, Split, Task, take_turn
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class CountTask(Task):
    """Say a number `times` times; the number differs per rollout."""

    name: ClassVar[str] = "count"
    description: ClassVar[str] = "count"

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"number": index}) for index in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": "add"}], tools=TOOLS)
        for turn in range(3):
            (call,) = await take_turn(model, trajectory, step=step, temperature=1.0)
            assert not isinstance(call, str)
            right = f'{{"number": {scenario.inputs["number"]}, "index": {rollout_index}, "turn": {turn}}}'
            trajectory.reward += call.function.arguments == right
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
        return trajectory.finish()

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        turn = -1

        async def answer(messages: Any, tools: Any) -> dict[str, Any]:
            nonlocal turn
            turn += 1
            assert tools == TOOLS
            assert len(messages) == 1 + 2 * turn
            await asyncio.sleep(random.random() / 100)
            arguments = {"number": scenario.inputs["number"], "index": rollout_index, "turn": turn}
            return {"tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}

        return answer


class PlainTask(CountTask):
    """A task without a scripted player."""

    name = "plain"
    player = Task.player


class BrokenTask(CountTask):
    name: ClassVar[str] = "broken"

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        return lambda messages, tools: {"content": str(1 // 0)}


async def test_rollouts_at_once_have_players_of_their_own() -> None:
    task = CountTask()
    model = ScriptedModel(task)
    scenarios = task.scenarios("test", seed=0, count=5)
    rollouts = await asyncio.gather(*(model.play(scenario, index) for scenario in scenarios for index in range(4)))
    assert [trajectory.reward for trajectory in rollouts] == [3.0] * 20
    assert len({call["id"] for m in rollouts[0].messages() for call in m.get("tool_calls") or ()}) == 3
    await model.close()


async def test_it_is_a_model_for_groups_and_captures() -> None:
    task = CountTask()
    model = ScriptedModel(task, name="perfect")
    assert (model.trainable, model.project, model.get_inference_name()) == (False, "count", "perfect")
    (scenario,) = task.scenarios("test", seed=0, count=1)

    async def rollout(index: int) -> Trajectory:
        with model.playing(scenario, index):
            async with art.capture(model) as captured:
                trajectory = await task.rollout(model, scenario, rollout_index=index)
            assert len(captured.trajectory.messages()) == len(trajectory.messages()) - 1  # without the last result
            return trajectory

    (group,) = await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(index) for index in range(3))])
    assert [trajectory.reward for trajectory in group] == [3.0] * 3


async def test_failures_are_said_at_once() -> None:
    (scenario,) = BrokenTask().scenarios("test", seed=0, count=1)
    with pytest.raises(openai.BadRequestError, match="the scripted player failed: ZeroDivisionError"):
        await ScriptedModel(BrokenTask()).play(scenario)
    model = ScriptedModel(CountTask())
    with pytest.raises(openai.BadRequestError, match="no scripted player is at work here"):
        await model.task.rollout(model, scenario)
    with model.playing(scenario), pytest.raises(openai.BadRequestError, match="does not stream"):
        await model.openai_client().chat.completions.create(model="m", messages=[], stream=True)
    with pytest.raises(ConfigError, match="has no scripted player; implement `player"):
        await ScriptedModel(PlainTask()).play(scenario)
