"""Make three trainings go wrong on purpose, and draw them for docs/troubleshooting.md.

art tiny-model /tmp/word --task benchmarks.games.word:Word
python -m benchmarks.troubles /tmp/word docs/images/troubles.png

few       two hidden words to train on: learnt by heart
alike     only a first guess that is right pays: hardly any group has rewards that differ
broke     a learning rate three times too high, until the pipeline ends the training by itself
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import art
from art.recipes.pictures import plot_learning
from art.task import Scenario
from benchmarks.games.word import Word

STEPS, EVERY, HELD_OUT = 30, 5, 200


@dataclass
class Story:
    """One training, with what is wrong with it."""

    name: str
    title: str
    words: tuple[str, ...] = ()
    """The hidden words of training; all of them if there are none here."""
    first_guess_only: bool = False
    learning_rate: float = 3e-3
    rewards: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, list[float]] = field(default_factory=dict)
    findings: dict[int, list[str]] = field(default_factory=dict)

    def scenarios(self) -> list[Scenario]:
        drawn = Word().scenarios("train", seed=0, count=600)
        return [one for one in drawn if not self.words or one.inputs["word"] in self.words]

    async def rollout(
        self, model: art.TrainableModel, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        trajectory: art.Trajectory = await Word().rollout(model, scenario, rollout_index=rollout_index, step=step)
        if self.first_guess_only:
            trajectory.reward = float(trajectory.reward == 1 and len(trajectory.messages_and_choices) == 3)
        return trajectory

    async def run(self, backend: art.LocalBackend, base_model: str) -> None:
        model = art.TrainableModel(name=self.name, project="troubles", base_model=base_model)
        await model.register(backend)
        pipeline = art.pipeline(
            model, scenarios=self.scenarios(), rollout=self.rollout, rollouts_per_group=8, groups_per_step=8,
            max_staleness=0, evaluate=Word().scenarios("val", seed=1, count=HELD_OUT), every=EVERY,
        )  # fmt: skip
        try:
            async for step in pipeline.train(steps=STEPS, learning_rate=self.learning_rate):
                if step.trained:
                    self.rewards[step.number] = step.reward
                    self.findings[step.number] = list(step.findings)
                for one in step.evaluations:
                    self.held_out[one.step] = [each.reward for each in one.trajectories]
                print(self.name, step.line(), flush=True)
        except art.errors.TrainingError as error:
            print(self.name, error)


STORIES = (
    Story("few", "training rises, held-out does not\n(2 scenarios to train on)", words=("abc", "cab")),
    Story("alike", "nothing is learnt\n(only a right first guess pays)", first_guess_only=True),
    Story("broke", "it was good and broke\n(learning rate three times too high)", learning_rate=1e-2),
)


async def main(base_model: str, picture: str) -> None:
    from matplotlib.figure import Figure

    with tempfile.TemporaryDirectory() as folder:
        async with art.LocalBackend(path=folder) as backend:
            for story in STORIES:
                await story.run(backend, base_model)
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    for axes, story in zip(figure.subplots(1, 3), STORIES, strict=True):
        plot_learning(axes, story.rewards, held_out=story.held_out, title=story.title)
        if story.name != "alike":  # one legend is enough, where there is room
            axes.get_legend().remove()
    figure.savefig(picture)
    for story in STORIES:
        for number, findings in story.findings.items():
            print(story.name, number, *findings)


if __name__ == "__main__":
    asyncio.run(main(str(Path(sys.argv[1]).resolve()), sys.argv[2]))
