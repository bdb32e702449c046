"""The training loop that all recipes share: `art.pipeline` on the scenarios of a task, with reports of its steps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from art.asynchronous.pipeline import pipeline
from art.asynchronous.step import PipelineStep
from art.config import PipelineConfig, TrainConfig
from art.errors import ConfigError
from art.faults import FaultWatch
from art.gather import gather_trajectories
from art.metrics.scores import mean_with_interval
from art.model import TrainableModel
from art.rewards import GroupScorer
from art.storage.history import means_by_step
from art.storage.layout import DataDir, ModelPaths
from art.storage.trajectories import read_groups
from art.task import Scenario, Split, Task, TaskDefaults, draw_scenarios
from art.task.names import read_tiny_model
from art.trajectory import Trajectory, TrajectoryGroup

MAX_FAULT_RATE = 0.5
"""A run ends when more than this share of the latest rollouts failed. Faults of the policy do not count."""
_FAULT_RATES = {
    "data/infra_fault_rate": "faults", "data/policy_fault_rate": "policy faults", "data/judge_fault_rate": "unjudged",
}  # fmt: skip
"""Metrics that a progress line shows unless they are 0, with the words for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Rewards, speed and metrics of one training step."""

    step: int
    """Newest checkpoint after the step, the number of its row in the history. A step without training repeats it."""
    reward: float
    """Mean reward of the step's rollouts."""
    headline: float
    """Mean of the task's headline metric over the step's rollouts."""
    tokens_per_s: float
    """Sampled tokens over wall time, without the time of training if rollouts wait for it. NaN if some of the rollouts
    ran before this call."""
    trained: bool
    """Whether the step made a checkpoint."""
    waited_s: float = 0.0
    """Time in which the trainer waited for rollouts: without staleness all of their time."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_s: float | None = None
    """Seconds that the remaining steps take at the pace of this call; `None` if that is not known or none remain."""
    staleness: float = 0.0
    """Mean over the step's groups of the checkpoint that the step started from, minus that of the group's beginning."""

    def line(self, headline_metric: str) -> str:
        """The step as a line of text, without its number.

        The gap is the difference between the log-probs
        of sampler and trainer on the same tokens. Of stale rollouts it tells nothing about the two, and is left out.
        """
        gap = None if self.staleness else self.metrics.get("offpolicy/first_update_gap")
        rates = [f"{name} {self.metrics[key]:.0%}" for key, name in _FAULT_RATES.items() if self.metrics.get(key)]
        return (
            f"reward {self.reward:+.3f}  {headline_metric} {self.headline:.3f}  "
            + ("" if math.isnan(self.tokens_per_s) else f"{self.tokens_per_s:,.0f} tokens/s  ")
            + f"waited {self.waited_s:.2f} s  train {self.metrics.get('time/step_trainer_s', 0.0):.2f} s"
            + (f"  staleness {self.staleness:.1f}" if self.staleness else "")
            + (f"  gap {gap:.0e} nats" if gap is not None else "")
            + "".join(f"  {rate}" for rate in rates)
            + ("" if self.trained else f"  (no reward spread: not trained, the model stays at checkpoint {self.step})")
            + ("" if self.left_s is None else f"  {duration(self.left_s)} left")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of `evaluate`: a task's headline metric on held-out scenarios."""

    mean: float
    """Mean of the metric over the rollouts."""
    interval: tuple[float, float]
    """95 % interval of the mean: Wilson's if all values are 0 or 1, else Student's t."""
    trajectories: list[Trajectory]
    """The rollouts that did not fail."""
    scores: Sequence[tuple[str, float]]
    """Id of the scenario and value of each of these rollouts."""


async def evaluate(
    model: TrainableModel,
    task: Task,
    *,
    count: int,
    seed: int,
    split: Split = "test",
    on_rollout: Callable[[int], None] = lambda num_ended: None,
) -> Evaluation:
    """Measure a task's headline metric by one rollout of each of `count` held-out scenarios, sampled as in training.

    Args:
        on_rollout: called after each rollout with the number of those that have ended.

    Raises:
        FaultRateError: a share of more than `MAX_FAULT_RATE` failed through no fault of the policy.
    """
    scenarios = draw_scenarios(task, split, seed=seed, count=count)
    ended = itertools.count(1)

    async def rollout(scenario: Scenario) -> Trajectory:
        try:
            trajectory = await task.rollout(model, scenario, rollout_index=0)
        finally:
            on_rollout(next(ended))
        if isinstance(trajectory, Trajectory):  # the gather names anything else
            trajectory.metadata.setdefault("scenario_id", scenario.id)  # checkpoints are compared scenario by scenario
        return trajectory

    gathered = await gather_trajectories(
        map(rollout, scenarios), pbar_desc=None, faults=FaultWatch(MAX_FAULT_RATE, window=max(count, 1))
    )
    trajectories = [trajectory for trajectory in gathered if isinstance(trajectory, Trajectory)]
    return _evaluation_of(task, trajectories)


def logged_evaluation(model: TrainableModel, task: Task, *, step: int, split: Split = "test") -> Evaluation | None:
    """Return all logged held-out rollouts of a checkpoint as one evaluation, as the page does; `None` without any."""
    path = _paths_of(model).trajectories(split, step)
    rollouts: list[Trajectory] = []
    for group in read_groups(path) if path.exists() else ():
        for trajectory in group:
            own_id = group.metadata.get("scenario_id") or f"unknown {len(rollouts)}"
            trajectory.metadata.setdefault("scenario_id", own_id)
            rollouts.append(trajectory)
    return _evaluation_of(task, rollouts) if rollouts else None


def _evaluation_of(task: Task, trajectories: list[Trajectory]) -> Evaluation:
    scores = [(str(one.metadata["scenario_id"]), headline_value(task, one)) for one in trajectories]
    mean, interval = mean_with_interval([value for _, value in scores])
    return Evaluation(mean=mean, interval=interval, trajectories=trajectories, scores=scores)


async def train_task(
    model: TrainableModel,
    task: Task,
    defaults: TaskDefaults,
    *,
    num_steps: int,
    seed: int,
    on_step: Callable[[StepReport], None],
    score: GroupScorer | None = None,
    after_step: Callable[[], Awaitable[None]] | None = None,
    rewarded: list[TrajectoryGroup] | None = None,
    pace: PipelineConfig | None = None,
) -> list[StepReport]:
    """Train a model on a task, from its newest checkpoint up to checkpoint `num_steps`, by `art.pipeline`.

    A later call with the same arguments goes on where this one ended, also after a kill.

    Args:
        on_step: called after each step, trained or not.
        score: gives the rewards in place of the task. A group that it drops is not trained on.
        after_step: awaited after each step that made a checkpoint. An exception from it ends the training.
        rewarded: groups that have rewards already; the first step trains on them instead of new ones.
        pace: how far rollouts may run ahead of the training, and other settings that the arguments do not have; by
            default no rollout begins before the step that it follows has ended.

    Raises:
        BudgetError: the model's budget is spent. Groups that were sampled and judged before are trained on first.
        FaultRateError: too many rollouts failed, or `score` dropped too many groups.
        TrainingError: nothing could be learnt for several steps in a row.
    """
    model.merge_state({"num_steps": num_steps})  # the page tells from it when the run will end
    options = task.options.model_dump(mode="json")
    about = {"name": task.name, "options": options, "headline_metric": task.headline_metric}
    made = read_tiny_model(model.base_model)
    await model.record_settings({"task": about} | ({} if made is None else {"tiny_model": made}))
    defaults, first = defaults.for_base_model(model.base_model), await model.get_step()
    size, pace = defaults.groups_per_step, pace or PipelineConfig(max_staleness=0)

    @lru_cache(maxsize=8)
    def draw(index: int) -> list[Scenario]:
        return draw_scenarios(task, "train", seed=seed * 1_000_003 + index, count=size)

    async def rollout(model: TrainableModel, scenario: Scenario, rollout_index: int) -> Trajectory:
        return await task.rollout(model, scenario, rollout_index=rollout_index)

    sizes = {"groups_per_step": size, "rollouts_per_group": defaults.rollouts_per_group, "seed": seed}
    running = pipeline(
        model, PipelineConfig(**{name: getattr(pace, name) for name in pace.model_fields_set} | sizes),
        scenarios=lambda position: draw(position // size)[position % size], rollout=rollout, after_each=score,
    )  # fmt: skip
    config = TrainConfig(learning_rate=defaults.rate_schedule(num_steps), num_minibatches=defaults.num_minibatches)

    async def make_steps() -> AsyncGenerator[PipelineStep]:
        if rewarded and first < num_steps:
            model.costs.check()
            result = await model.train(rewarded, config)
            yield PipelineStep(
                number=result.step, trained=result.trained, groups=rewarded, metrics=result.metrics,
                reward=statistics.fmean(trajectory.reward for group in rewarded for trajectory in group),
                findings=result.findings,
            )  # fmt: skip
        async with aclosing(running.train(num_steps, config)) as steps:
            async for step in steps:
                yield step

    reporter = _Reporter(task, num_steps, pace.max_staleness, paced_from=(first, time.perf_counter()))
    reports: list[StepReport] = []
    async with aclosing(make_steps()) as steps:
        async for step in steps:
            report = reporter.report(step)
            reports.append(report)
            on_step(report)
            if after_step is not None and report.trained:
                await after_step()
    return reports


async def step_to_report(model: TrainableModel) -> int:
    """Return the step after which a training goes on to report its steps.

    It is the newest checkpoint, or the one before it if a run was stopped when its last step was trained and not yet
    logged: the next run logs and reports that step first.
    """
    step = await model.get_step()
    logged, _ = means_by_step(_paths_of(model).history, "train/reward")
    return step - 1 if max(logged, default=step) == step - 1 else step


def _paths_of(model: TrainableModel) -> ModelPaths:
    return DataDir(Path(model.base_path)).model(model.project, model.name)


@dataclass(slots=True)
class _Reporter:
    """Describes the steps of one training, and estimates when it will end."""

    task: Task
    num_steps: int
    max_staleness: int
    paced_from: tuple[int, float]
    """A checkpoint and the time at which it was there: the time that is left is estimated by the steps since then."""
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def report(self, step: PipelineStep) -> StepReport:
        """Describe a step with the task's headline metric."""
        metrics, timing = step.metrics, step.timing
        trajectories = [trajectory for group in step.groups for trajectory in group]
        is_resumed = any(trajectory.start_time.astimezone(UTC) < self.began for trajectory in trajectories)
        sampling_s = timing.wall_s - (0.0 if self.max_staleness else timing.train_s)
        tokens = math.nan if is_resumed else metrics.get("ledger/sampled_tokens", math.nan)
        now = time.perf_counter()
        if is_resumed:
            self.paced_from = step.number, now
        since, paced_at = self.paced_from
        num_left = self.num_steps - step.number
        return StepReport(
            step=step.number, reward=step.reward,
            headline=statistics.fmean(headline_value(self.task, trajectory) for trajectory in trajectories),
            tokens_per_s=tokens / sampling_s if sampling_s > 0 else math.nan, trained=step.trained, metrics=metrics,
            left_s=num_left * (now - paced_at) / (step.number - since) if num_left and step.number > since else None,
            staleness=step.staleness_mean, waited_s=timing.waited_for_rollouts_s,
        )  # fmt: skip


def headline_value(task: Task, trajectory: Trajectory) -> float:
    """The task's headline metric of one rollout.

    Raises:
        ConfigError: the rollout did not set the metric.
    """
    if task.headline_metric == "reward":
        return trajectory.reward
    if task.headline_metric not in trajectory.metrics:
        raise ConfigError(
            f"task {task.name!r}: its `headline_metric` is {task.headline_metric!r}, but a rollout set only "
            f"{', '.join(trajectory.metrics) or 'nothing'} among its trajectory's metrics; set it in every rollout, or "
            'leave `headline_metric` at "reward"'
        )
    return float(trajectory.metrics[task.headline_metric])


def duration(seconds: float) -> str:
    """Write seconds for people: `8.4 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
