"""`Run`: one call of `Pipeline.train`, with everything that it opens and closes again.

journal     what an earlier run left; a step that it had submitted is finished first
flow        starts groups as the pace allows, also while the trainer works and while the user looks at a step
trainer     trains and logs one step when the user asks for it
evaluator   evaluates checkpoints beside all that
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from art.asynchronous.concurrency import Concurrency
from art.asynchronous.curriculum import has_spread
from art.asynchronous.evaluating import SPLIT, Evaluator, HeldOut
from art.asynchronous.flow import MAX_BARREN_STEPS, Flow, UnderWay
from art.asynchronous.journal import Journal, KeptGroup, PendingStep
from art.asynchronous.pace import Pace
from art.asynchronous.running import GroupRunner, RolloutFunction, RolloutRunner, check_engine
from art.asynchronous.source import Source
from art.asynchronous.step import PipelineStep, PipelineTiming
from art.asynchronous.step_trainer import StepTrainer, TrainerClock, check_barren, describe_timing
from art.asynchronous.watch import Stopwatch
from art.config import PipelineConfig, TrainConfig
from art.gather.faults import POLICY_FAULT_RATE, FaultWatch
from art.gather.gather import AfterEach
from art.storage.layout import DataDir
from art.trajectory import Trajectory, cancel_and_wait

if TYPE_CHECKING:
    from art.backend import TrainJob, TrainResult
    from art.model import TrainableModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a pipeline was given to run."""

    source: Source
    rollout: RolloutFunction
    after_each: AfterEach | None
    held_out: HeldOut | None
    evaluate_every: int
    """Steps between two evaluations."""


class Run:
    """One training, from the newest checkpoint up to another. Use it as an async context manager."""

    def __init__(
        self, model: TrainableModel[Any, Any], inputs: Inputs, config: PipelineConfig, faults: FaultWatch, *,
        last_step: int, train_config: TrainConfig,
    ) -> None:  # fmt: skip
        self._model, self._inputs, self._config, self._faults = model, inputs, config, faults
        self._last_step, self._train_config = last_step, train_config
        self._limiter = Concurrency(config.max_concurrent, lambda: model.backend().engine_pressure(model))
        self._rollouts = RolloutRunner(model, config, self._limiter, faults)
        self._log_lock, self._held = asyncio.Lock(), Stopwatch()
        self._findings: list[str] = []
        self._straggling: str | None = None
        """What was last logged about the rollouts that the next step waits for."""
        self._ended: list[PipelineStep] = []
        """The last steps, as many as `MAX_BARREN_STEPS`, and the best of those before them."""
        self._open = AsyncExitStack()
        self.is_closing = False
        """Whether the run has ended, or is about to."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            folder = DataDir(Path(self._model.base_path)).model(self._model.project, self._model.name).pipeline
            self._journal = await Journal.open(folder, self._identity())
            opened.push_async_callback(self._journal.close)
            self._evaluator = self._make_evaluator(folder)
            if self._evaluator is not None:
                opened.push_async_callback(self._evaluator.close)
            self._runner = GroupRunner(self._rollouts, self._inputs.rollout, self._inputs.after_each, self._journal)
            self._trainer = StepTrainer(
                model=self._model, config=self._train_config, journal=self._journal, source=self._inputs.source,
                clock=TrainerClock(self._held), log_lock=self._log_lock, measure=self._measure,
                on_checkpoint=self._on_checkpoint,
            )  # fmt: skip
            self._flow: Flow | None = None
            self._spent_usd = self._model.costs.spent_usd
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs, wait for its end, and close the journal."""
        self.is_closing = True
        await self._open.aclose()

    async def begin(self) -> PipelineStep | None:
        """Take up what an earlier run left, and start the first groups.

        Returns:
            The step that the earlier run had submitted, finished now; `None` if there was none.
        """
        resumed, source = self._journal.resumed, self._inputs.source
        source.restore(resumed.chooser_state)
        kept = {one.plan.number: one for one in resumed.groups}
        lost = await self._find_lost(resumed.groups)
        step = None if resumed.pending is None else await self._finish(resumed.pending, kept, lost)
        kept = {number: one.without(lost) for number, one in kept.items()}
        version = await check_engine(self._model, self._config)
        first_number = resumed.next_number or version * self._config.groups_per_step
        pace = Pace(
            groups_per_step=self._config.groups_per_step, max_staleness=self._config.max_staleness,
            step=version, last_step=max(version, self._last_step), next_number=first_number,
        )  # fmt: skip
        self._flow = flow = Flow(pace, source, self._runner, self._held)
        self._open.push_async_callback(flow.close)
        self._follow_engine(flow)
        if self._evaluator is not None:
            await self._evaluator.resume(resumed.evaluations, version if version < self._last_step else None)
        await flow.resume([one for _, one in sorted(kept.items())])
        flow.fill()
        return step

    async def next_step(self) -> PipelineStep | None:
        """Train the next step; `None` if the last one was trained, or nothing is left to learn.

        Raises:
            TrainingError: the last steps had nothing to learn from, and the policy may have collapsed.
            Exception: what ends the training, see `Flow.next_step`.
        """
        flow = self._flow
        assert flow is not None
        if flow.pace.version >= self._last_step or check_barren(self._ended, MAX_BARREN_STEPS):
            return None
        with self._trainer.clock.waiting.running():
            numbers = await flow.next_step(self._on_wait)
        version = flow.pace.version
        taken = flow.begin(numbers)

        def published(result: TrainResult) -> None:
            flow.published(result.step, trained=result.trained)

        pending = self._trainer.pending(version, taken)
        await self._journal.step_begun(pending)
        with self._trainer.clock.training.running():
            job = await self._trainer.submit(pending, [group for one in taken for group in one.groups])
        return await self._train(pending, taken, job, published)

    async def _find_lost(self, kept: Sequence[KeptGroup]) -> set[str]:
        """Return the exchanges that an earlier run's rollouts name and the server does not have, and say so."""
        named = {one.plan.number: one.exchange_ids() for one in kept}
        every = sorted(set().union(*named.values()))
        lost = set(await self._model.backend().missing_exchanges(self._model, every)) if every else set()
        if lost:
            finding = (
                f"the server does not have {len(lost)} of the {len(every)} recorded answers in rollouts of an earlier "
                f"run, which are in {sum(not lost.isdisjoint(ids) for ids in named.values())} groups: these rollouts "
                "are run again, with the same seeds"
            )
            self._findings.append(finding)
            logger.warning(finding)
        return lost

    async def _finish(self, pending: PendingStep, kept: dict[int, KeptGroup], lost: set[str]) -> PipelineStep | None:
        """Finish a step that an earlier run had begun; `None` if it failed, which leaves its groups for the next."""
        source, own = self._inputs.source, [kept[number] for number in pending.numbers if number in kept]
        if len(own) < len(pending.numbers):  # the step failed in an earlier run, and a group of it was run again
            return None
        taken = [UnderWay(plan=one.plan, index=source.resume(one.plan).index, groups=one.groups or []) for one in own]
        can_submit = all(lost.isdisjoint(one.exchange_ids()) for one in own)
        with self._trainer.clock.training.running():
            groups = [group for one in taken for group in one.groups]
            job = await self._trainer.follow(pending, groups if can_submit else None)
        if job is None:
            return None
        step = await self._train(pending, taken, job, lambda result: None)
        for number in pending.numbers:
            del kept[number]
        return step

    async def _train(self, pending: PendingStep, taken: list[UnderWay], job: TrainJob, published: Any) -> PipelineStep:
        step = await self._trainer.train(pending, taken, job, published)
        evaluations: Sequence[Any] = ()
        if self._evaluator is not None:
            if step.number >= self._last_step:
                await self._evaluator.wait()
            evaluations, failed = self._evaluator.take()
            self._findings += failed
        findings, self._findings = [*step.findings, *self._findings], []
        if self._straggling is not None:
            findings.append(self._straggling)
            self._straggling = None
        step = replace(step, findings=findings, evaluations=evaluations)
        self._remember(step)
        return step

    def _remember(self, step: PipelineStep) -> None:
        self._ended.append(replace(step, groups=()))  # not the rollouts, which would fill the memory
        if len(self._ended) > MAX_BARREN_STEPS + 1:
            first, second, *rest = self._ended
            best = replace(first, reward=max(first.reward, second.reward), trained=first.trained or second.trained)
            self._ended = [best, *rest]

    def _follow_engine(self, flow: Flow) -> None:
        def on_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                flow.fail(error)

        task = asyncio.create_task(self._limiter.run(), name="pipeline-concurrency")
        task.add_done_callback(on_end)
        self._open.push_async_callback(cancel_and_wait, [task])

    def _make_evaluator(self, folder: Path) -> Evaluator | None:
        held_out = self._inputs.held_out
        return None if held_out is None else Evaluator(held_out, self._rollouts, self._journal, folder, self._log)

    async def _on_checkpoint(self, step: int) -> None:
        if self._evaluator is not None and (step % self._inputs.evaluate_every == 0 or step >= self._last_step):
            await self._evaluator.start(step)

    def _on_wait(self, stragglers: list[str]) -> None:
        text = "; ".join(stragglers) or "the rollouts of some groups have ended, and `after_each` still works on them"
        self._straggling = f"the step waited for rollouts: {text}"
        logger.warning("the next step waits for rollouts: %s", text)

    def _measure(self, taken: Sequence[UnderWay], timing: PipelineTiming, result: TrainResult) -> dict[str, float]:
        spent_usd, self._spent_usd = self._spent_usd, self._model.costs.spent_usd
        costs = {"seconds": timing.wall_s}
        if (tokens := result.metrics.get("ledger/sampled_tokens")) is not None:
            costs["tokens"] = tokens
        if self._spent_usd > spent_usd:
            costs["usd"] = self._spent_usd - spent_usd
        num_lost = 0 if self._flow is None else self._flow.take_num_lost()
        metrics = _measure_groups(taken, num_lost, self._config.rollouts_per_group, costs)
        metrics |= describe_timing(timing) | self._fault_rates(taken)
        metrics |= self._inputs.source.metrics() | self._limiter.metrics()
        if callable(measure := getattr(self._inputs.after_each, "metrics", None)):
            metrics |= measure()
        if self._flow is not None:
            waiting = float(len(self._flow.pace.finished))
            metrics |= {"pipeline/groups_running": float(self._flow.num_running), "pipeline/groups_waiting": waiting}
        return metrics

    def _fault_rates(self, taken: Sequence[UnderWay]) -> dict[str, float]:
        """Return the rates of faults: those of the policy in the step's own rollouts, others since the step before.

        What failed otherwise has no step if its whole group was lost. The policy's faults are trained on, and rollouts
        that run ahead belong to later steps.
        """
        own = FaultWatch(max_rate=1.0)
        own.count_groups(group for one in taken for group in one.groups)
        rates = {name: value for name, value in self._faults.metrics().items() if name != POLICY_FAULT_RATE}
        spoilt = own.metrics().get(POLICY_FAULT_RATE)
        return rates if spoilt is None else {POLICY_FAULT_RATE: spoilt, **rates}

    async def _log(self, trajectories: Sequence[Trajectory], step: int) -> None:
        async with self._log_lock:
            await self._model.log(trajectories, split=SPLIT, step=step, row_id=f"pipeline-{SPLIT}-{step:06d}")

    def _identity(self) -> Mapping[str, Any]:
        """What the groups under way depend on."""
        config = self._config
        return {
            "rollouts_per_group": config.rollouts_per_group, "seed": config.seed, **self._inputs.source.identity,
        }  # fmt: skip


def _measure_groups(
    taken: Sequence[UnderWay], num_lost: int, rollouts_per_group: int, costs: Mapping[str, float]
) -> dict[str, float]:
    """Count the groups of a step that taught something, and what each of them cost.

    Example: 4 groups of 8 rollouts, 2 of them with spread, in 60 s: 16 rollouts and 30 s per useful group

    Args:
        num_lost: groups since the step before that ended with nothing to train on.
        costs: what all groups cost together, by unit.
    """
    num_groups = len(taken) + num_lost
    num_useful = sum(has_spread([trajectory.reward for group in one.groups for trajectory in group]) for one in taken)
    costs = {"rollouts": num_groups * rollouts_per_group, **costs}
    metrics = {
        "pipeline/groups_useful_share": num_useful / max(1, num_groups),
        "pipeline/groups_lost": float(num_lost),
        "pipeline/rollouts_run": float(costs["rollouts"]),
    }
    if num_useful:
        metrics |= {f"pipeline/{name}_per_useful_group": cost / num_useful for name, cost in costs.items()}
    return metrics
