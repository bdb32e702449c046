"""What scripted policies reach on the held-out scenarios of a task, without a model: a second or two for each."""

from __future__ import annotations

import random
from typing import Any

from art.gather import gather_trajectories
from art.metrics.scores import mean_with_interval
from art.task import Scenario, Task, derive_seed, draw_scenarios, get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_recipes.training.training_loop import headline_value
from benchmarks.learnt.policies import POLICIES, Policy
from benchmarks.learnt.results import Baseline

SEED = 1
"""Seed of the scenarios, and of what the policies choose at random."""


async def measure_baselines(name: str, *, count: int) -> dict[str, Baseline]:
    """Measure each policy of a task on `count` held-out scenarios of the form that a tiny model gets.

    Raises:
        ConfigError: `name` is no task.
        KeyError: no policies are known for it.
    """
    task = get_task(name, is_tiny=True)
    policies = POLICIES[name]
    return {which: await _measure(task, getattr(policies, which), count) for which in ("random", "constant", "rule")}


async def _measure(task: Task, policy: Policy, count: int) -> Baseline:
    model, scenarios = ScriptedModel(_played_by(task, policy)), draw_scenarios(task, "test", seed=SEED, count=count)
    try:
        played = await gather_trajectories(map(model.play, scenarios), pbar_desc=None)
    finally:
        await model.close()
    values = [_value(task, one) for one in played if isinstance(one, Trajectory)]
    if len(values) < len(played):
        raise RuntimeError(f"{task.name}: {len(played) - len(values)} rollouts of a scripted policy failed")
    mean, (low, high) = mean_with_interval(values)
    return Baseline(about=policy.about, mean=mean, low=low, high=high)


def _played_by(task: Task, policy: Policy) -> Task:
    """Make the same task with another scripted player."""

    def player(self: Task, scenario: Scenario, *, rollout_index: int = 0) -> Any:
        return policy.make(task, scenario, random.Random(derive_seed(scenario.seed, "baseline")))

    kind: type[Task] = type(type(task).__name__, (type(task),), {"player": player})
    return kind(**task.options.model_dump())


def _value(task: Task, trajectory: Trajectory) -> float:
    """The headline metric; of a task that only a judge scores, what a judge without errors would give."""
    if not task.needs_judge:
        return headline_value(task, trajectory)
    score: Any = task.score_messages(trajectory.messages())  # type: ignore[arg-type]
    return float(score[0] if isinstance(score, tuple) else score)
