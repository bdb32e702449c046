"""Trainings of one seed on one task, one for each source of rewards, from the same tiny model and on one server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from art.errors import TrainingError
from art.gather import gather_trajectory_groups
from art.local_backend import LocalBackend
from art.model import TrainableModel
from art.recipes import train_task
from art.rewards import GroupScorer, JudgeSettings, Ruler, combine, params_at
from art.task import Split, Task, TaskDefaults, draw_scenarios
from art.testing.judge import ScriptedJudge, grade_messages
from art.testing.tiny_model import build_tiny_model
from art.trajectory import TrajectoryGroup
from art_recipes.training.training_loop import evaluate
from benchmarks.judging.reliability import find_noise, measure, set_noise
from benchmarks.judging.results import Arm, Point, Settings, Training
from benchmarks.report import environment

CHECKED_GROUPS = 32
"""Groups on which a judge is measured."""


async def train_arms(
    task: Task, seed: int, arms: Sequence[Arm], settings: Settings, folder: Path
) -> AsyncIterator[Training]:
    """Train once for each arm, one after the other, and yield each training when it has ended."""
    base = build_tiny_model(folder / "base", task=task, seed=seed)
    async with LocalBackend(path=folder, show_page=False) as backend:
        course = _Course(task, seed, settings, base, backend)
        start = await course.new_model("start")
        groups = await course.sample_groups(start)
        first = await course.evaluate(start, 0)
        for number, arm in enumerate(arms):
            with ScriptedJudge(grade_messages(task.score_messages), seed=seed) as judge:
                yield await course.train(await course.new_model(f"arm{number}"), arm, judge, groups, first)


@dataclass(slots=True)
class _Course:
    """What the trainings of one seed have in common."""

    task: Task
    seed: int
    settings: Settings
    base: Path
    backend: LocalBackend

    async def new_model(self, name: str) -> TrainableModel:
        model: TrainableModel = TrainableModel(
            name=name, project=self.task.name, base_model=str(self.base), report_metrics=[]
        )
        await model.register(self.backend)
        return model

    @property
    def defaults(self) -> TaskDefaults:
        sizes: dict[str, Any] = {"groups_per_step": self.settings.groups, "rollouts_per_group": self.settings.rollouts}
        if self.settings.learning_rate is not None:
            sizes["learning_rate"] = self.settings.learning_rate
        return replace(self.task.defaults, num_steps=self.settings.steps, **sizes)

    async def train(
        self, model: TrainableModel, arm: Arm, judge: ScriptedJudge, groups: Sequence[TrajectoryGroup], first: Point
    ) -> Training:
        about, started = environment("cpu", []), time.perf_counter()
        ruler = Ruler(
            "openai/judge", extra_litellm_params=params_at(judge.base_url),
            settings=JudgeSettings(passes=arm.passes),
        )  # fmt: skip
        noise, before, curve = 0.0, None, [first]
        if arm.reliability is not None:
            noise = find_noise(judge, self._true_scores(groups), arm.reliability) if arm.reliability < 1 else 0.0
            set_noise(judge, noise)
            before = await measure(ruler, groups)
        asked = len(judge.requests)

        async def look() -> None:
            step = await model.get_step()
            if step % self.settings.every == 0 or step == self.settings.steps:
                curve.append(await self.evaluate(model, step))

        with contextlib.suppress(TrainingError):  # no group has a spread any more: the policy always does the same
            await train_task(
                model, self.task, self.defaults, num_steps=self.settings.steps, seed=self.seed,
                on_step=lambda report: None, score=self._scorer(arm, ruler), after_step=look,
            )  # fmt: skip
        if curve[-1].step < self.settings.steps:  # it ended early, and stays as it is
            curve.append(await self.evaluate(model, self.settings.steps))
        asked = len(judge.requests) - asked
        after = None if arm.reliability is None else await measure(ruler, await self.sample_groups(model))
        return Training(
            arm=arm, seed=self.seed, noise=noise, before=before, after=after, curve=curve, judge_requests=asked,
            wall_s=time.perf_counter() - started, environment={k: v for k, v in about.items() if k != "command"},
        )  # fmt: skip

    def _scorer(self, arm: Arm, ruler: Ruler) -> GroupScorer | None:
        if arm.source == "hand":
            return None
        if arm.source == "judge":
            return GroupScorer(ruler)
        judges = {"judge": ruler, "task": lambda trajectory: trajectory.reward}
        return GroupScorer(combine(judges, weights={"judge": 0.5, "task": 0.5}))

    def _true_scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """The score of each rollout without noise. Groups of equal rollouts are left out, as in a check."""
        scores = []
        for group in groups:
            conversations = [[dict(message) for message in trajectory.messages()] for trajectory in group]
            if all(conversation == conversations[0] for conversation in conversations):
                continue
            graded = [self.task.score_messages(conversation) for conversation in conversations]
            scores.append([score[0] if isinstance(score, tuple) else score for score in graded])
        return scores

    async def sample_groups(self, model: TrainableModel) -> list[TrajectoryGroup]:
        """Sample the groups on which the judge is measured; none of them is trained on."""
        split: Split = "val"
        scenarios = draw_scenarios(self.task, split, seed=self.seed + 1_000_000, count=CHECKED_GROUPS)
        return await gather_trajectory_groups(
            (
                TrajectoryGroup(
                    self.task.rollout(model, scenario, rollout_index=index) for index in range(self.settings.rollouts)
                )
                for scenario in scenarios
            ),
            pbar_desc=None,
        )

    async def evaluate(self, model: TrainableModel, step: int) -> Point:
        evaluation = await evaluate(
            model, self.task, count=self.settings.evaluate, seed=self.seed, split=self.settings.split
        )
        low, high = evaluation.interval
        return Point(step=step, mean=evaluation.mean, low=low, high=high)
