"""The evaluation of recipes on held-out scenarios: what it logs lets two checkpoints be compared scenario by scenario."""

from __future__ import annotations

import random
from typing import Any

from art.task import Scenario, Split, Task
from art.trajectory import Trajectory
from art_recipes.training.training_loop import evaluate


class Guess(Task):
    """A task as a user writes one: every rollout begins with the same words, and names no scenario."""

    name = "guess"
    description = "guess"

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"number": index}) for index in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        reward = random.Random(scenario.seed).random()
        return Trajectory(messages_and_choices=[{"role": "user", "content": "begin"}], reward=reward)


async def test_held_out_rollouts_have_the_ids_of_their_scenarios() -> None:
    task = Guess()
    model: Any = None
    evaluation = await evaluate(model, task, count=5, seed=3)
    ids = [trajectory.metadata.get("scenario_id") for trajectory in evaluation.trajectories]
    assert ids == [scenario.id for scenario in task.scenarios("test", seed=3, count=5)]
