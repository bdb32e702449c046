"""The training loop that all recipes share: gather, train, log, step after step.

It uses only the public API, so it is also the longest example of that API.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from art.config import TrainConfig
from art.errors import BudgetError, ConfigError, TrainingError
from art.gather import gather_trajectories, gather_trajectory_groups
from art.gather.faults import FaultWatch
from art.model import TrainableModel
from art.recipes.reactions import Reactions
from art.rewards import GroupScorer
from art.task import Split, Task, TaskDefaults, draw_scenarios
from art.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

MAX_BARREN_STEPS = 5
"""A training ends after this many steps in a row without anything to learn: the policy has collapsed or is perfect."""
MAX_FAULT_RATE = 0.5
"""A run ends when more than this share of the latest rollouts failed. Faults of the policy do not count."""
_FAULT_RATES = {
    "data/infra_fault_rate": "faults", "data/policy_fault_rate": "policy faults", "data/judge_fault_rate": "unjudged",
}  # fmt: skip
"""Metrics that a progress line shows unless they are 0, with the words for them."""
CONFIDENCE_Z = 1.959964
"""Normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Wall time of one step, in seconds, by activity."""

    rollout_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Rewards, speed and metrics of one training step."""

    step: int
    reward: float
    """Mean reward of the step's rollouts."""
    headline: float
    """Mean of the task's headline metric over the step's rollouts."""
    tokens_per_s: float
    """Sampled tokens over rollout time."""
    timing: Timing
    trained: bool
    """Whether the step made a checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    num_groups: int = 0
    """Number of groups that got rewards."""
    checkpoint: int | None = None
    """Step of the newest checkpoint afterwards: lower than `step` by the number of steps that were not trained."""
    ending: str | None = None
    """Why a finding of this step ended the training, in a sentence; `None` if it did not."""

    def line(self, headline_metric: str) -> str:
        """The step as a line of text, without its number.

        The gap is the difference between the log-probs of sampler and trainer on the same tokens.
        """
        gap = self.metrics.get("offpolicy/first_update_gap")
        why = "no reward spread" if self.num_groups else "no group with rewards"
        kept = "" if self.checkpoint is None else f", the model stays at checkpoint {self.checkpoint}"
        rates = [f"{name} {self.metrics[key]:.0%}" for key, name in _FAULT_RATES.items() if self.metrics.get(key)]
        return (
            f"reward {self.reward:+.3f}  {headline_metric} {self.headline:.3f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"rollout {self.timing.rollout_s:.2f} s  train {self.timing.train_s:.2f} s"
            + (f"  gap {gap:.0e} nats" if gap is not None else "")
            + "".join(f"  {rate}" for rate in rates)
            + ("" if self.trained else f"  ({why}: not trained{kept})")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of `evaluate`: a task's headline metric on held-out scenarios."""

    mean: float
    """Mean of the metric over the rollouts."""
    interval: tuple[float, float]
    """95 % interval of the mean: Wilson's if all values are 0 or 1, else the normal one."""
    trajectories: list[Trajectory]
    """The rollouts that did not fail."""
    seconds: float
    """Wall time of the rollouts."""


async def evaluate(
    model: TrainableModel,
    task: Task,
    *,
    count: int,
    seed: int,
    split: Split = "test",
    rollout_timeout_s: float | None = None,
) -> Evaluation:
    """Measure a task's headline metric by one rollout of each of `count` held-out scenarios, sampled as in training.

    Raises:
        FaultRateError: a share of more than `MAX_FAULT_RATE` failed through no fault of the policy.
    """
    started = time.perf_counter()
    scenarios = draw_scenarios(task, split, seed=seed, count=count)
    gathered = await gather_trajectories(
        (task.rollout(model, scenario, rollout_index=0) for scenario in scenarios),
        pbar_desc=None,
        faults=FaultWatch(MAX_FAULT_RATE, window=max(count, 1)),
        rollout_timeout_s=rollout_timeout_s,
    )
    trajectories = [trajectory for trajectory in gathered if isinstance(trajectory, Trajectory)]
    values = [headline_value(task, trajectory) for trajectory in trajectories]
    mean, interval = mean_with_interval(values)
    return Evaluation(mean=mean, interval=interval, trajectories=trajectories, seconds=time.perf_counter() - started)


async def train_task(
    model: TrainableModel,
    task: Task,
    defaults: TaskDefaults,
    *,
    num_steps: int,
    seed: int,
    on_step: Callable[[StepReport], None],
    score: GroupScorer | None = None,
    faults: FaultWatch | None = None,
    rollout_timeout_s: float | None = None,
    after_step: Callable[[], Awaitable[None]] | None = None,
    rewarded: list[TrajectoryGroup] | None = None,
    reactions: Reactions | None = None,
) -> list[StepReport]:
    """Train a model on a task, from its newest checkpoint up to step `num_steps`.

    Args:
        on_step: called after each step, trained or not.
        score: gives the rewards in place of the task. A group that it drops is not trained on.
        faults: ends the run if too many rollouts fail; by default more than `MAX_FAULT_RATE` of the last 64.
        rollout_timeout_s: seconds after which a rollout is ended and left out.
        after_step: awaited after each step that made a checkpoint. An exception from it ends the training.
        rewarded: groups that have rewards already; the first step trains on them instead of new ones.
        reactions: findings that end the training. The last report then has the reason as `ending`.

    Raises:
        BudgetError: the model's budget is spent. Groups that were sampled and judged before are trained on first.
        FaultRateError: too many rollouts failed, or `score` dropped too many groups.
        TrainingError: nothing could be learnt for `MAX_BARREN_STEPS` steps in a row.
    """
    defaults = defaults.for_base_model(model.base_model)
    reports: list[StepReport] = []
    barren = 0
    first = await model.get_step()
    model.merge_state({"num_steps": num_steps})  # the page tells from it when the run will end
    step = _Step(model, task, defaults, score, faults or FaultWatch(MAX_FAULT_RATE), rollout_timeout_s)
    for index in range(first, num_steps):
        model.costs.check()
        report = await step.run(index, num_steps, seed, rewarded if index == first else None)
        if reactions is not None and report.trained and report.checkpoint is not None:
            ending = await reactions.end(model, report.metrics, report.checkpoint)
            report = replace(report, ending=ending)
        reports.append(report)
        on_step(report)
        if after_step is not None and report.trained:
            await after_step()
        if report.ending is not None:
            logger.info("training ends after %d of %d steps: %s", report.step, num_steps, report.ending)
            break
        # A step without groups says nothing about the policy; `faults` and `score` end a run that has too many.
        barren = 0 if report.trained else barren + bool(report.num_groups)
        if barren == MAX_BARREN_STEPS:
            has_learnt = any(earlier.trained for earlier in reports)
            if has_learnt and report.reward >= max(earlier.reward for earlier in reports):
                logger.warning(
                    "training ends after %d of %d steps, at checkpoint %d: in the last %d steps the rollouts of each "
                    "scenario all earned the same, %.3f on average and never more before. The task is solved as far as "
                    "its reward can tell",
                    report.step, num_steps, await model.get_step(), barren, report.reward,
                )  # fmt: skip
                break
            raise TrainingError(
                f"{barren} steps in a row had no group with differing rewards (mean reward {report.reward:.3f}). If "
                "that is low the policy has collapsed: go back to an earlier checkpoint (newest: "
                f"{await model.get_step()}) and lower the learning rate. If it is high the task is solved"
            )
    return reports


@dataclass(frozen=True, slots=True)
class _Step:
    """Runs the steps of one training."""

    model: TrainableModel
    task: Task
    defaults: TaskDefaults
    score: GroupScorer | None
    faults: FaultWatch
    rollout_timeout_s: float | None

    async def run(self, index: int, num_steps: int, seed: int, rewarded: list[TrajectoryGroup] | None) -> StepReport:
        started = time.perf_counter()
        groups = rewarded or await self._gather(index, seed)
        rollout_s = time.perf_counter() - started
        trajectories = [trajectory for group in groups for trajectory in group]
        headline = _mean([headline_value(self.task, trajectory) for trajectory in trajectories])
        config = TrainConfig(
            learning_rate=self.defaults.rate_schedule(num_steps), num_minibatches=self.defaults.num_minibatches
        )
        metrics = self.faults.metrics() | (self.score.metrics() if self.score is not None else {})
        result = await self.model.backend().train(self.model, groups, config=config) if groups else None
        if result is not None:
            metrics = result.metrics | metrics
        await self.model.log(groups, split="train", metrics=metrics, step=None if result is None else result.step)
        train_s, publish_s = metrics.get("time/step_trainer_s", 0.0), metrics.get("time/publish_s", 0.0)
        return StepReport(
            step=index + 1, reward=_mean([trajectory.reward for trajectory in trajectories]), headline=headline,
            tokens_per_s=metrics.get("ledger/sampled_tokens", math.nan) / rollout_s,
            timing=Timing(rollout_s=rollout_s, train_s=train_s, publish_s=publish_s),
            trained=result is not None and result.trained, metrics=metrics, num_groups=len(groups),
            checkpoint=await self.model.get_step() if result is None else result.step,
        )  # fmt: skip

    async def _gather(self, index: int, seed: int) -> list[TrajectoryGroup]:
        task, count, size = self.task, self.defaults.groups_per_step, self.defaults.rollouts_per_group
        scenarios = draw_scenarios(task, "train", seed=seed * 1_000_003 + index, count=count)
        return await gather_trajectory_groups(
            (TrajectoryGroup(task.rollout(self.model, s, rollout_index=i) for i in range(size)) for s in scenarios),
            pbar_desc=None,
            after_each=self._score,
            faults=self.faults,
            rollout_timeout_s=self.rollout_timeout_s,
        )

    async def _score(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        if self.score is None:
            return group
        try:
            return await self.score(group)
        except BudgetError:  # the next step is not begun; the groups that were paid for are trained on
            logger.warning("dropped a group: the budget for its judge is spent")
            return None


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


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


def mean_with_interval(values: list[float]) -> tuple[float, tuple[float, float]]:
    """Mean and 95 % interval; Wilson's score interval when all values are 0 or 1.

    Example: 50 wins of 100 give (0.5, (0.404, 0.596)).
    """
    count, z = len(values), CONFIDENCE_Z
    if count == 0:
        return math.nan, (math.nan, math.nan)
    mean = statistics.fmean(values)
    if all(value in (0.0, 1.0) for value in values):
        centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
        half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / (1 + z * z / count)
        return mean, (centre - half, centre + half)
    half = z * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.inf
    return mean, (mean - half, mean + half)
