"""Evaluation of checkpoints on held-out scenarios, beside the training: nothing waits for it but the last step."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.asynchronous.journal import Journal
from art.asynchronous.plan import RolloutOutcome, RolloutPlan
from art.asynchronous.running import RolloutCall, RolloutFunction, RolloutRunner, all_or_nothing
from art.asynchronous.step import PipelineEvaluation
from art.asynchronous.watch import now
from art.client.rollout_context import derive_seed
from art.errors import FaultRateError
from art.gather import GatherContext
from art.gather.faults import FaultWatch
from art.report.scores import Estimate, estimate_change, mean_with_interval
from art.storage.atomic import write_file
from art.trajectory import Trajectory, cancel_and_wait, finite_number

logger = logging.getLogger(__name__)

SPLIT = "val"
"""Split under which evaluations are logged."""

Log = Callable[[Sequence[Trajectory], int], Awaitable[None]]
"""Logs the trajectories of an evaluation of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out scenarios, and the function that runs a rollout of each."""

    scenarios: Sequence[Any]
    ids: Sequence[str]
    """Id of each scenario."""
    rollout: RolloutFunction


class Evaluator:
    """Evaluates checkpoints with one rollout of each held-out scenario, as tasks of their own."""

    def __init__(self, held_out: HeldOut, rollouts: RolloutRunner, journal: Journal, folder: Path, log: Log) -> None:
        """
        Args:
            folder: folder of the pipeline, which keeps the rewards of the first evaluation.
        """
        self._held_out, self._rollouts, self._journal, self._log = held_out, rollouts, journal, log
        self._path = folder / "evaluation.json"
        self._state = (
            json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {"steps": [], "first": {}}
        )
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
        held_out, began = self._held_out, now()
        count, ids = len(held_out.scenarios), held_out.ids
        context = GatherContext(faults=FaultWatch(self._rollouts.config.max_fault_rate, window=count))
        missing = [index for index in range(count) if index not in outcomes]
        self._rollouts.num_queued += len(missing)
        await all_or_nothing([self._rollout(step, index, outcomes, context) for index in missing])
        by_id = {ids[index]: outcomes[index] for index in range(count)}
        scored = {
            name: outcome
            for name, outcome in by_id.items()
            if isinstance(outcome, Trajectory) and finite_number(outcome.reward) is not None
        }
        rewards = {name: float(trajectory.reward) for name, trajectory in scored.items()}
        change = self._change(rewards)
        for name, trajectory in scored.items():
            trajectory.metadata.setdefault("scenario_id", name)
        if scored:
            await self._log(list(scored.values()), step)
        await self._remember(step, rewards)
        await self._journal.evaluation_ended(step)
        mean, interval = mean_with_interval(list(rewards.values()))
        return PipelineEvaluation(
            step=step, mean=mean, interval=interval, change=change, trajectories=list(scored.values()),
            seconds=now() - began,
        )  # fmt: skip

    async def _rollout(
        self, step: int, index: int, outcomes: dict[int, RolloutOutcome], context: GatherContext
    ) -> None:
        config, held_out = self._rollouts.config, self._held_out
        call = RolloutCall(
            function=held_out.rollout, scenario=held_out.scenarios[index], scenario_id=held_out.ids[index], step=step,
            plan=RolloutPlan(group=-1 - step, index=index, seed=derive_seed("val", config.seed, index)),
        )  # fmt: skip
        outcomes[index] = await self._rollouts.run(call, context)
        await self._journal.evaluation_rollout_ended(step, index, outcomes[index])

    def _change(self, rewards: Mapping[str, float]) -> Estimate | None:
        first: dict[str, float] = self._state["first"]
        return estimate_change(first.items(), rewards.items()) if first.keys() & rewards.keys() else None

    async def _remember(self, step: int, rewards: Mapping[str, float]) -> None:
        self._state["first"] = self._state["first"] or dict(rewards)
        self._state["steps"] = [*self._state["steps"], step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        async with self._writing:
            await asyncio.to_thread(write_file, self._path, json.dumps(self._state).encode())
