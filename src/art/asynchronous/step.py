"""`PipelineStep`: what one step of a pipeline did, and who waited for whom; and the evaluations beside the training."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.asynchronous.flow import RolloutCall, RolloutRunner, all_or_nothing, now
from art.asynchronous.journal import Journal
from art.asynchronous.source import HeldOut, RolloutOutcome
from art.client.rollout_context import derive_seed
from art.errors import FaultRateError
from art.faults import FaultWatch
from art.gather import GatherContext
from art.metrics.scores import Estimate, estimate_change, mean_with_interval
from art.storage.atomic import write_file
from art.trajectory import Trajectory, TrajectoryGroup, cancel_and_wait, finite_number

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """Wall time of one step in seconds. Rollouts and training overlap, so the parts add up to more than the whole."""

    wall_s: float = 0.0
    """From the end of the step before, or the beginning of the call of `train`, to the end of this step."""
    waited_for_rollouts_s: float = 0.0
    """Part of `wall_s` in which the trainer had nothing to do, because groups were missing."""
    train_s: float = 0.0
    """Part of `wall_s` for the training job, from the request to the new checkpoint being served."""
    held_s: float = 0.0
    """Part of `wall_s` in which no further group could start, because it would have been too stale when trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEvaluation:
    """Rewards of one checkpoint on held-out scenarios."""

    step: int
    """The checkpoint. Training went on meanwhile, so it may be older than the newest."""
    mean: float
    """Mean reward; NaN if every rollout failed."""
    interval: tuple[float, float]
    """95 % interval of the mean: Wilson's if all rewards are 0 or 1, else Student's t."""
    change: Estimate | None
    """Change of the reward since the pipeline's first evaluation, with its 95 % interval; each scenario is compared
    with itself. `None` for the first evaluation, and if they have no scenario in common."""
    trajectories: Sequence[Trajectory]
    """The rollouts that did not fail, in the order of the scenarios."""
    seconds: float
    """Wall time of the rollouts."""

    def text(self) -> str:
        """Return the evaluation as a few words."""
        low, high = self.interval
        change = "" if self.change is None else f", change {self.change.text(sign=True)}"
        return f"evaluation of checkpoint {self.step}: {self.mean:.3f} (95 %: {low:.3f} to {high:.3f}){change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """What one training step did. `async for step in pipeline.train(...)` yields them."""

    number: int
    """Step of the newest checkpoint afterwards."""
    trained: bool
    """Whether the step made that checkpoint. If not, there was nothing to learn from its groups."""
    groups: Sequence[TrajectoryGroup]
    """The groups that the step was given, oldest first."""
    reward: float
    """Mean reward of their rollouts."""
    staleness_mean: float = 0.0
    """Mean over the groups of the checkpoint that the step started from, minus the one that the group began with."""
    staleness_max: int = 0
    """Largest staleness of a group; never above `max_staleness`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of the step, as they were logged."""
    findings: Sequence[str] = ()
    """What is unusual about the step, in sentences (docs/metrics.md), and which rollouts it waited for too long."""
    timing: PipelineTiming = PipelineTiming()
    evaluations: Sequence[PipelineEvaluation] = ()
    """Evaluations that have ended since the step before, in the order of their checkpoints."""

    @property
    def evaluation(self) -> PipelineEvaluation | None:
        """The newest evaluation that has ended since the step before; `None` if none has."""
        return self.evaluations[-1] if self.evaluations else None

    def line(self) -> str:
        """Return the step as a line of text: reward, staleness, who waited for whom, and the ledger."""
        timing, sampled = self.timing, self.metrics.get("ledger/sampled_tokens")
        parts = [
            f"step {self.number:>4}",
            f"reward {self.reward:+.3f}",
            f"staleness {self.staleness_mean:.1f} (max {self.staleness_max})",
            f"{timing.wall_s:.1f} s",
            f"training {timing.train_s:.1f} s",
            f"waited for rollouts {timing.waited_for_rollouts_s:.1f} s",
            f"rollouts held {timing.held_s:.1f} s",
        ]
        if sampled:
            share = self.metrics.get("ledger/trained_tokens", 0.0) / sampled
            parts.append(f"{share:.0%} of {sampled:,.0f} tokens trained")
        if not self.trained:
            parts.append("(nothing to learn: not trained)")
        parts += [evaluation.text() for evaluation in self.evaluations]
        return "  ".join(parts)


class Evaluator:
    """Evaluates checkpoints with one rollout of each held-out scenario, as tasks of their own."""

    def __init__(
        self, held_out: HeldOut, rollouts: RolloutRunner, journal: Journal, folder: Path,
        log: Callable[[Sequence[Trajectory], int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """
        Args:
            folder: folder of the pipeline, which keeps the rewards of the first evaluation.
            log: logs the trajectories of an evaluation of a checkpoint.
        """
        self._held_out, self._rollouts, self._journal, self._log = held_out, rollouts, journal, log
        self._path = folder / "evaluation.json"
        self._state: dict[str, Any] = {"steps": [], "first": {}}
        if self._path.exists():
            self._state = json.loads(self._path.read_text(encoding="utf-8"))
        self._writing = asyncio.Lock()
        """Held while the file is written: several evaluations may end at once."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: list[PipelineEvaluation] = []
        self._findings: list[str] = []

    async def start(self, step: int, kept: Mapping[int, RolloutOutcome] | None = None) -> None:
        """Begin the evaluation of checkpoint `step`, unless it was evaluated before.

        Args:
            kept: rollouts that an earlier run has finished, by index.
        """
        if step in self._tasks or step in self._state["steps"]:
            return
        if kept is None:
            await self._journal.evaluation_begun(step)
        self._tasks[step] = asyncio.create_task(self._run(step, dict(kept or {})), name=f"pipeline-evaluation-{step}")

    async def resume(self, kept: Mapping[int, Mapping[int, RolloutOutcome]], newest: int | None) -> None:
        """Go on with the evaluations of an earlier run, or begin with checkpoint `newest` if there was none."""
        for step, outcomes in kept.items():
            if step in self._state["steps"]:  # killed when it had only to be crossed off
                await self._journal.evaluation_ended(step)
            else:
                await self.start(step, outcomes)
        if newest is not None and not self._tasks and not self._state["steps"]:
            await self.start(newest)

    def take(self) -> tuple[list[PipelineEvaluation], list[str]]:
        """Return the evaluations that have ended since the last call, and what went wrong with others."""
        ended, self._ended = sorted(self._ended, key=lambda one: one.step), []
        findings, self._findings = self._findings, []
        return ended, findings

    async def wait(self) -> None:
        """Wait until no evaluation is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Cancel the evaluations under way, and wait for their end. A later run goes on with them."""
        await cancel_and_wait(self._tasks.values())

    async def _run(self, step: int, outcomes: dict[int, RolloutOutcome]) -> None:
        try:
            evaluation = await self._evaluate(step, outcomes)
            self._ended.append(evaluation)
        except FaultRateError as error:
            self._findings.append(f"no evaluation of checkpoint {step}: {error.message}")
            logger.warning("%s", self._findings[-1])
            await self._journal.evaluation_ended(step)
        except Exception as error:
            self._findings.append(f"no evaluation of checkpoint {step}: {type(error).__name__}: {error}")
            logger.exception("no evaluation of checkpoint %d", step)
        finally:
            del self._tasks[step]

    async def _evaluate(self, step: int, outcomes: dict[int, RolloutOutcome]) -> PipelineEvaluation:
        held_out, config, began = self._held_out, self._rollouts.config, now()
        count = len(held_out.scenarios)
        context = GatherContext(faults=FaultWatch(config.max_fault_rate, window=count))

        async def run(index: int) -> None:
            call = RolloutCall(
                function=held_out.rollout, scenario=held_out.scenarios[index], scenario_id=held_out.ids[index],
                order=(-1 - step, index), seed=derive_seed("val", config.seed, index), step=step,
            )  # fmt: skip
            outcomes[index] = await self._rollouts.run(call, context)
            await self._journal.evaluation_rollout_ended(step, index, outcomes[index])

        missing = [index for index in range(count) if index not in outcomes]
        self._rollouts.num_queued += len(missing)
        await all_or_nothing([run(index) for index in missing])
        scored = {
            held_out.ids[index]: outcome
            for index in range(count)
            if isinstance(outcome := outcomes[index], Trajectory) and finite_number(outcome.reward) is not None
        }
        rewards = {name: float(trajectory.reward) for name, trajectory in scored.items()}
        first: dict[str, float] = self._state["first"]
        change = estimate_change(first.items(), rewards.items()) if first.keys() & rewards.keys() else None
        for name, trajectory in scored.items():
            trajectory.metadata.setdefault("scenario_id", name)
        if scored:
            await self._log(list(scored.values()), step)
        self._state = {"steps": [*self._state["steps"], step], "first": self._state["first"] or rewards}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        async with self._writing:
            await asyncio.to_thread(write_file, self._path, json.dumps(self._state).encode())
        await self._journal.evaluation_ended(step)
        mean, interval = mean_with_interval(list(rewards.values()))
        return PipelineEvaluation(
            step=step, mean=mean, interval=interval, change=change, trajectories=list(scored.values()),
            seconds=now() - began,
        )  # fmt: skip
