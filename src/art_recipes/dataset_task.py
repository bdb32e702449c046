"""A task from a data set: the agent gets the system prompt and one input, and answers. A judge sets the reward.

task = DatasetTask(Dataset.load("opening-hours"))
await train_task(model, task, task.defaults, num_steps=50, seed=0, on_step=print, score=scorer)
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError
from art.task import Scenario, Split, Task, TaskDefaults, derive_seed, sample_answer
from art.trajectory import Trajectory
from art_recipes.scenarios import Dataset, WrittenScenario

if TYPE_CHECKING:
    from art.model import Model


class DatasetTask(Task):
    """A task with the inputs of a data set: the agent answers each in one turn, and a judge sets the reward."""

    name: ClassVar[str] = "dataset"
    description: ClassVar[str] = "answer the inputs of a data set"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=50, groups_per_step=8, num_minibatches=1, schedule="constant"
    )
    needs_judge: ClassVar[bool] = True

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Return `count` scenarios: in training at random, none twice before all were drawn; else in the file's order.

        Raises:
            ConfigError: the split is empty.
        """
        lines = self.dataset.split(split)
        if not lines:
            raise ConfigError(
                f'no scenario is in split {split!r}: add some, or set "split": "{split}" in some lines of the file'
            )
        if split != "train":
            return [self._scenario(line, seed) for line in lines[:count]]
        rng = random.Random(derive_seed(self.name, split, seed))
        drawn: list[WrittenScenario] = []
        while len(drawn) < count:
            drawn += rng.sample(lines, min(len(lines), count - len(drawn)))
        return [self._scenario(line, seed, repetition=drawn[:i].count(line)) for i, line in enumerate(drawn)]

    def _scenario(self, line: WrittenScenario, seed: int, *, repetition: int = 0) -> Scenario:
        inputs = line.model_dump(include={"input", "difficulty"}, exclude_none=True)
        scenario_id = f"{self.label}/{derive_seed(line.input):x}"
        return Scenario(id=scenario_id, seed=derive_seed(scenario_id, seed, repetition), inputs=inputs)

    def opening(self, scenario: Scenario) -> list[dict[str, str]]:
        """The messages before the agent's answer."""
        return [
            {"role": "system", "content": self.dataset.task.system_prompt},
            {"role": "user", "content": scenario.inputs["input"]},
        ]

    def prompt_scenario(self, prompt: str) -> Scenario:
        return self._scenario(WrittenScenario(input=prompt), 0)

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Ask the model for one answer to the scenario's input. The reward stays 0, for a judge to set.

        If the answer is longer than allowed, the metric `cut_short` is 1 and `metadata["outcome"]` is `policy_fault`.
        """
        task = self.dataset.task
        trajectory = Trajectory(
            messages_and_choices=list(self.opening(scenario)), metadata={"scenario_id": scenario.id}
        )
        choice = await sample_answer(
            model, trajectory, step=step, temperature=task.temperature,
            max_completion_tokens=task.max_completion_tokens, seed=derive_seed(scenario.seed, rollout_index),
        )  # fmt: skip
        cut_short = choice.finish_reason == "length"
        trajectory.metrics["cut_short"] = float(cut_short)
        trajectory.metadata["outcome"] = "policy_fault" if cut_short else "ok"
        return trajectory.finish()
