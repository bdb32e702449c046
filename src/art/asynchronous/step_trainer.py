"""Trains the groups of one step, logs them, and describes what happened: the trainer's side of a pipeline."""

from __future__ import annotations

import asyncio
import logging
import statistics
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art.asynchronous.flow import UnderWay
from art.asynchronous.journal import Journal, PendingStep
from art.asynchronous.source import Source
from art.asynchronous.step import PipelineStep, PipelineTiming
from art.asynchronous.watch import Stopwatch, now
from art.config import TrainConfig
from art.errors import ArtError, ConfigError, NotFoundError, TrainingError
from art.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from art.backend import TrainJob, TrainResult
    from art.model import TrainableModel

logger = logging.getLogger(__name__)


class TrainerClock:
    """Measures a step: its wall time, and how much of it the trainer waited for rollouts."""

    def __init__(self, held: Stopwatch) -> None:
        """
        Args:
            held: seconds in which the pace let no further group start.
        """
        self._held = held
        self._began = now()
        self.waiting = Stopwatch()
        self.training = Stopwatch()

    def lap(self) -> PipelineTiming:
        """Return the times since the last call."""
        began, self._began = self._began, now()
        return PipelineTiming(
            wall_s=self._began - began, waited_for_rollouts_s=self.waiting.lap(), train_s=self.training.lap(),
            held_s=self._held.lap(),
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class StepTrainer:
    """Trains and logs the steps of one pipeline, one after the other."""

    model: TrainableModel[Any, Any]
    config: TrainConfig
    journal: Journal
    source: Source
    clock: TrainerClock
    log_lock: asyncio.Lock
    """Held while something is logged, so that rows of training and of evaluation do not mix."""
    measure: Callable[[Sequence[UnderWay], PipelineTiming, TrainResult], dict[str, float]]
    """Returns numbers about the pipeline since the step before, given the groups, times and result of this one."""
    on_checkpoint: Callable[[int], Awaitable[None]]
    """Awaited with the number of a new checkpoint before its step counts as ended."""

    def pending(self, step: int, taken: Sequence[UnderWay]) -> PendingStep:
        """Make the record of a step that starts from checkpoint `step`."""
        # Of the fields that were set everything: a loss is known by its `type`, which is never set.
        config = self.config.model_dump(mode="json", include=self.config.model_fields_set)
        numbers = tuple(one.plan.number for one in taken)
        return PendingStep(step=step, job_id=uuid.uuid4().hex, numbers=numbers, config=config)

    async def submit(self, pending: PendingStep, groups: Sequence[TrajectoryGroup]) -> TrainJob:
        """Submit a new step."""
        config = TrainConfig.model_validate(pending.config)
        return await self.model.backend().train(self.model, groups, config, wait=False, job_id=pending.job_id)

    async def follow(self, pending: PendingStep, groups: Sequence[TrajectoryGroup] | None) -> TrainJob | None:
        """Follow a step that an earlier run has begun, or submit it if the server never got it.

        Args:
            groups: `None` if they cannot be submitted, because the server has lost what they name.

        Returns:
            `None` if its job has failed or was cancelled, or cannot be submitted.
        """
        try:
            job = await self.model.backend().follow_train_job(self.model, pending.job_id)
        except NotFoundError:
            return None if groups is None else await self.submit(pending, groups)
        try:
            await job
        except ArtError as error:
            if (await job.status()).state not in ("failed", "cancelled"):
                raise
            logger.warning("the step of the earlier run failed, and is begun again: %s", error)
            return None
        return job

    async def train(
        self, pending: PendingStep, taken: Sequence[UnderWay], job: TrainJob, published: Callable[[TrainResult], None]
    ) -> PipelineStep:
        """Wait until the groups of a step are trained, and log them.

        Args:
            published: called as soon as the new checkpoint is served, before anything is logged.
        """
        groups = [group for one in taken for group in one.groups]
        with self.clock.training.running():
            result = await job
        for one in taken:  # before further groups are chosen; no state is written down until `step_ended`
            self.source.report(one.index, [trajectory.reward for group in one.groups for trajectory in group])
        published(result)
        timing = self.clock.lap()
        metrics = dict(result.metrics) | self.measure(taken, timing, result)
        async with self.log_lock:
            await self.model.log(groups, split="train", metrics=metrics, step=result.step, row_id=pending.job_id)
        if result.trained:
            await self.on_checkpoint(result.step)
        await self.journal.step_ended(result.step, pending.numbers, chooser_state=self.source.state())
        rewards = [trajectory.reward for group in groups for trajectory in group]
        staleness = [pending.step - one.plan.policy_version for one in taken]
        return PipelineStep(
            number=result.step, trained=result.trained, groups=groups, metrics=metrics, findings=result.findings,
            reward=statistics.fmean(rewards), staleness_mean=statistics.fmean(staleness),
            staleness_max=max(staleness), timing=timing,
        )  # fmt: skip


def describe_timing(timing: PipelineTiming) -> dict[str, float]:
    """Return the times of a step as metrics."""
    return {
        "time/step_wall_s": timing.wall_s,
        "time/step_waited_for_rollouts_s": timing.waited_for_rollouts_s,
        "time/step_held_s": timing.held_s,
        "pipeline/trainer_idle_share": timing.waited_for_rollouts_s / timing.wall_s if timing.wall_s else 0.0,
    }


def check_barren(steps: Sequence[PipelineStep], most: int) -> bool:
    """Whether the training ends because nothing was left to learn in the last `most` of its steps.

    Raises:
        TrainingError: nothing was ever learnt, or the reward was higher before: the policy may have collapsed.
    """
    if len(steps) < most or any(step.trained for step in steps[-most:]):
        return False
    last = steps[-1]
    if any(step.trained for step in steps) and last.reward >= max(step.reward for step in steps):
        logger.warning(
            "training ends at checkpoint %d: in the last %d steps the rollouts of each scenario all earned the same, "
            "%.3f on average and never more before. The task is solved as far as its reward can tell",
            last.number, most, last.reward,
        )  # fmt: skip
        return True
    raise TrainingError(
        f"{most} steps in a row had no group with differing rewards (mean reward {last.reward:.3f}). If that is low "
        f"the policy has collapsed: go back to an earlier checkpoint (newest: {last.number}) and lower the learning "
        "rate. If it is high the task is solved"
    )


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings of `train` that a pipeline cannot honour.

    Raises:
        ConfigError: there is one.
    """
    if "on_nothing" in settings:
        raise ConfigError(
            "`on_nothing` does not apply to a pipeline: a step without anything to learn is reported as "
            "`trained=False`, and several of them in a row end the training",
            param="on_nothing",
        )
