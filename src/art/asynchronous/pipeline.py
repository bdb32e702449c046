"""`art.pipeline`: training while further rollouts run.

pipeline = art.pipeline(model, scenarios=train_set, rollout=my_rollout, max_staleness=2)
async for step in pipeline.train(steps=500, learning_rate=1e-5):
    print(step.line())

One call of `train` is a `PipelineRun`, with everything that it opens and closes again:

steps       the loop: gather ahead, train, publish, journal
journal     what an earlier run left; a step that it had submitted is finished first
flow        starts groups as the pace allows, also while the trainer works and while the user looks at a step
evaluator   evaluates checkpoints beside all that
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from art.asynchronous.flow import MAX_BARREN_STEPS, Flow, RolloutRunner, Stopwatch, UnderWay, now
from art.asynchronous.journal import Journal, KeptGroup, PendingStep
from art.asynchronous.pace import Pace
from art.asynchronous.source import Inputs, RolloutFunction, make_source, read_held_out
from art.asynchronous.step import Evaluator, PipelineEvaluation, PipelineStep, PipelineTiming
from art.config import PipelineConfig, TrainConfig
from art.config.pipeline import check_staleness
from art.config.training import SPREAD_TOLERANCE, train_config
from art.errors import ArtError, ConfigError, NotFoundError, TrainingError
from art.faults import POLICY_FAULT_RATE, FaultWatch
from art.gather import AfterEach
from art.rollout_workers import Workers
from art.storage.layout import DataDir
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.backend import TrainJob, TrainResult
    from art.model import TrainableModel

logger = logging.getLogger(__name__)

SPLIT = "val"
"""Split under which evaluations are logged."""
EVALUATE_EVERY = 20
"""Steps between two evaluations, unless the user says otherwise."""
Rollout = Callable[..., Awaitable[Trajectory]]
Scenarios = Sequence[Any] | Callable[[int], Any]


def pipeline(
    model: TrainableModel[Any, Any],
    config: PipelineConfig | None = None,
    *,
    scenarios: Scenarios,
    rollout: Rollout,
    after_each: AfterEach | None = None,
    evaluate: Sequence[Any] | tuple[Sequence[Any], Rollout] | None = None,
    every: int | None = None,
    workers: Workers | None = None,
    **settings: Any,
) -> Pipeline:
    """Make a pipeline, which trains a model while further rollouts run.

    A rollout starts only if it can still be trained within `max_staleness` steps, so none is thrown away for its age.
    It ends with the checkpoint that it began with: inside it, `model.get_inference_name()` names that one. With
    `max_staleness=0` the result is that of a loop of `gather_trajectory_groups`, `train` and `log`.

    Args:
        model: a model that is registered with a backend.
        config: settings as an object.
        scenarios: a list, which is gone through again and again, or a function that returns the scenario at a position
            (0, 1, 2, ...), the same whenever it is called. An `id`, as an attribute or a key, names a scenario.
        rollout: `async def rollout(model, scenario)`, which returns a trajectory with its reward. Parameters named
            `rollout_index` and `seed` get the index in the group, and a seed for randomness of your own.
        after_each: called with each finished group, e.g. a judge; returns the group to keep, several, or `None` to drop
            it. Numbers that its method `metrics()` returns, if it has one, are logged with each step.
        evaluate: held-out scenarios, of which an evaluation runs one rollout each; or a pair of them and another
            rollout function.
        every: steps between two evaluations; 20 by default. The first is of the checkpoint that the training begins
            with, and the last of the one that it ends with.
        workers: runs the rollouts in processes of its own, such as `art.RayWorkers(8)`; at most as many at once as it
            has seats. By default they are tasks of this event loop. `after_each` runs here.
        settings: fields of `PipelineConfig` by name.

    Raises:
        ConfigError: a setting is unknown, wrong or without effect.
    """
    if config is not None and not isinstance(config, PipelineConfig):
        raise ConfigError(f"`config` takes an art.config.PipelineConfig(...), got {config!r}", param="config")
    whole = {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}
    if twice := sorted(whole.keys() & settings.keys()):
        raise ConfigError(f"{', '.join(twice)}: given twice, by `config` and by itself; keep one")
    chosen = PipelineConfig(**whole, **settings)
    if evaluate is None and every is not None:
        raise ConfigError("`every` does nothing without `evaluate`, held-out scenarios", param="every")
    if every is not None and every < 1:
        raise ConfigError(f"`every` must be at least 1, got {every}", param="every")
    function = RolloutFunction(rollout, workers)
    inputs = Inputs(
        source=make_source(scenarios, chosen), rollout=function, after_each=after_each,
        held_out=read_held_out(evaluate, function), evaluate_every=every or EVALUATE_EVERY, workers=workers,
    )  # fmt: skip
    return Pipeline(model, chosen, inputs)


class Pipeline:
    """Trains one model while further rollouts run; `art.pipeline` makes it. Use it in one event loop."""

    def __init__(self, model: TrainableModel[Any, Any], config: PipelineConfig, inputs: Inputs) -> None:
        self.model, self.config = model, config
        self._inputs, self._faults = inputs, FaultWatch(config.max_fault_rate)
        self._run: PipelineRun | None = None

    async def train(
        self, steps: int, config: TrainConfig | None = None, **settings: Any
    ) -> AsyncGenerator[PipelineStep]:
        """Train up to checkpoint `steps`, and yield each step when it is trained and logged.

        The next step is trained when it is asked for; rollouts go on meanwhile. A later call with the same inputs goes
        on where this one ended, also after a kill: finished rollouts, judged groups and submitted steps are kept on
        disk, and rollouts that were interrupted start again with the same seeds. Leaving the loop early, or an error,
        cancels the rollouts that run; what has finished is kept for the next call.

        Args:
            steps: number of the checkpoint to end with.
            config: settings of the training steps as a whole.
            settings: single settings of the training steps by name, as for `backend.train`.

        Raises:
            ConfigError: a setting is wrong, or groups are under way that were begun with other settings.
            BudgetError: the model's budget is spent. Groups that were paid for are trained before.
            FaultRateError: too many rollouts failed.
            TrainingError: a step failed, or five steps in a row had nothing to learn from.
        """
        if "on_nothing" in settings:
            raise ConfigError(
                "`on_nothing` does not apply to a pipeline: a step without anything to learn is reported as "
                "`trained=False`, and several of them in a row end the training",
                param="on_nothing",
            )
        chosen = train_config(config, settings)
        check_staleness(chosen, self.config.max_staleness)
        for _ in range(3):  # Python ends a generator that nobody iterates any more in the next turns of the loop
            await asyncio.sleep(0)
        while self._run is not None and self._run.is_closing:
            await asyncio.sleep(0.01)
        if self._run is not None:
            raise ConfigError("this pipeline trains already; leave that loop first, or await `pipeline.close()`")
        await self.model.record_settings({"pipeline": {"steps": steps, **self.config.model_dump(mode="json")}})
        run = PipelineRun(self.model, self._inputs, self.config, self._faults, last_step=steps, train_config=chosen)
        try:
            async with run:
                self._run = run
                self.model.backend().close_with(self, self.close)
                async with aclosing(run.steps()) as made:
                    async for step in made:
                        yield step
        finally:
            self._run = None

    async def close(self) -> None:
        """Cancel the rollouts that run, and wait for their end. A later call of `train` goes on from there."""
        if self._run is not None:
            await self._run.close()


class PipelineRun:
    """One training, from the newest checkpoint up to another. Use it as an async context manager."""

    def __init__(
        self, model: TrainableModel[Any, Any], inputs: Inputs, config: PipelineConfig, faults: FaultWatch, *,
        last_step: int, train_config: TrainConfig,
    ) -> None:  # fmt: skip
        self._model, self._inputs, self._config, self._faults = model, inputs, config, faults
        self._last_step, self._train_config = last_step, train_config
        self._rollouts = RolloutRunner(model, config, faults, inputs.workers)
        self._waiting, self._training, self._held = Stopwatch(), Stopwatch(), Stopwatch()
        """Seconds in which the trainer waits for rollouts, in which it works, and in which no group may start."""
        self._log_lock = asyncio.Lock()
        """Held while something is logged, so that rows of training and of evaluation do not mix."""
        self._findings: list[str] = []
        self._straggling: str | None = None
        """What was last logged about the rollouts that the next step waits for."""
        self._ended: list[PipelineStep] = []
        """The last steps, as many as `MAX_BARREN_STEPS`, and the best of those before them."""
        self._flow: Flow | None = None
        self._evaluator: Evaluator | None = None
        self._open = AsyncExitStack()
        self.is_closing = False
        """Whether the run has ended, or is about to."""

    async def __aenter__(self) -> Self:
        config, identity = self._config, self._inputs.source.identity
        identity = {"rollouts_per_group": config.rollouts_per_group, "seed": config.seed, **identity}
        async with AsyncExitStack() as opened:
            folder = DataDir(Path(self._model.base_path)).model(self._model.project, self._model.name).pipeline
            self._journal = await Journal.open(folder, identity)
            opened.push_async_callback(self._journal.close)
            if self._inputs.held_out is not None:
                self._evaluator = Evaluator(self._inputs.held_out, self._rollouts, self._journal, folder, self._log)
                opened.push_async_callback(self._evaluator.close)
            self._lap_began = now()
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs, wait for its end, and close the journal."""
        self.is_closing = True
        await self._open.aclose()

    async def steps(self) -> AsyncGenerator[PipelineStep]:
        """Train step after step, each when it is asked for. Groups of rollouts run ahead of it all the time.

        Raises:
            TrainingError: the last steps had nothing to learn from, and the policy may have collapsed.
            Exception: what ends the training, see `Flow.next_step`.
        """
        kept, finished = await self._take_up()
        flow = await self._gather_ahead(kept)
        if finished is not None:
            yield finished
        while flow.pace.version < self._last_step and not is_solved(self._ended):
            with self._waiting.running():
                numbers = await flow.next_step(self._on_wait)
            version = flow.pace.version
            taken = flow.begin(numbers)
            # Of the fields that were set everything: a loss is known by its `type`, which is never set.
            config = self._train_config.model_dump(mode="json", include=self._train_config.model_fields_set)
            pending = PendingStep(step=version, job_id=uuid.uuid4().hex, numbers=tuple(numbers), config=config)
            await self._journal.step_begun(pending)
            with self._training.running():
                job = await self._submit(pending, taken)
                result = await job
            flow.published(result.step, trained=result.trained)
            yield await self._conclude(pending, taken, result)

    async def _take_up(self) -> tuple[list[KeptGroup], PipelineStep | None]:
        """Return the groups that an earlier run left, and the step that it had submitted, finished now."""
        resumed = self._journal.resumed
        named = {one.plan.number: one.exchange_ids() for one in resumed.groups}
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
        groups, pending, step = {one.plan.number: one for one in resumed.groups}, resumed.pending, None
        # Without some of its groups the step failed in an earlier run, and they were run again.
        if pending is not None and groups.keys() >= set(pending.numbers):
            taken = [UnderWay(plan=groups[i].plan, groups=groups[i].groups or []) for i in pending.numbers]
            can_submit = all(lost.isdisjoint(named[i]) for i in pending.numbers)
            with self._training.running():
                result = await self._finish(pending, taken, can_submit=can_submit)
            if result is not None:
                step = await self._conclude(pending, taken, result)
                groups = {number: one for number, one in groups.items() if number not in pending.numbers}
        return [one.without(lost) for _, one in sorted(groups.items())], step

    async def _finish(self, pending: PendingStep, taken: list[UnderWay], *, can_submit: bool) -> TrainResult | None:
        """Follow a step that an earlier run has begun, or submit it if the server never got it.

        Returns:
            `None` if its job has failed or was cancelled, or cannot be submitted: its groups are for the next step.
        """
        try:
            job = await self._model.backend().follow_train_job(self._model, pending.job_id)
        except NotFoundError:
            return await (await self._submit(pending, taken)) if can_submit else None
        try:
            return await job
        except ArtError as error:
            if (await job.status()).state not in ("failed", "cancelled"):
                raise
            logger.warning("the step of the earlier run failed, and is begun again: %s", error)
            return None

    async def _gather_ahead(self, kept: Sequence[KeptGroup]) -> Flow:
        """Start the flow of groups, with those of an earlier run first.

        Raises:
            ConfigError: the engine serves fewer checkpoints at a time than rollouts may ask for.
        """
        config, model, resumed = self._config, self._model, self._journal.resumed
        status = await model.backend().get_status(model)
        version, num_needed, num_served = status.step, config.max_staleness + 1, status.steps_at_once
        if config.in_flight == "finish" and num_served is not None and num_needed > num_served:
            raise ConfigError(
                f"with max_staleness={config.max_staleness}, rollouts ask for {num_needed} checkpoints of "
                f"{model.project}/{model.name} at a time, and its engine serves {num_served}, because whole weights "
                f'are trained or merged; set in_flight="switch", or max_staleness={num_served - 1}',
                param="in_flight",
            )
        pace = Pace(
            groups_per_step=config.groups_per_step, max_staleness=config.max_staleness, step=version,
            last_step=max(version, self._last_step),
            next_number=resumed.next_number or version * config.groups_per_step,
        )  # fmt: skip
        self._flow = flow = Flow(pace, self._inputs, self._rollouts, self._journal, self._held)
        self._open.push_async_callback(flow.close)

        if self._evaluator is not None:
            await self._evaluator.resume(resumed.evaluations, version if version < self._last_step else None)
        await flow.resume(kept)
        flow.fill()
        return flow

    def _on_wait(self, stragglers: list[str]) -> None:
        text = "; ".join(stragglers) or "the rollouts of some groups have ended, and `after_each` still works on them"
        self._straggling = f"the step waited for rollouts: {text}"
        logger.warning("the next step waits for rollouts: %s", text)

    async def _submit(self, pending: PendingStep, taken: Sequence[UnderWay]) -> TrainJob:
        groups, config = [group for one in taken for group in one.groups], TrainConfig.model_validate(pending.config)
        return await self._model.backend().train(self._model, groups, config, wait=False, job_id=pending.job_id)

    async def _conclude(self, pending: PendingStep, taken: Sequence[UnderWay], result: TrainResult) -> PipelineStep:
        """Log a step that was trained, begin an evaluation if one is due, and let its groups leave the journal."""
        groups = [group for one in taken for group in one.groups]
        began, self._lap_began = self._lap_began, now()
        timing = PipelineTiming(
            wall_s=self._lap_began - began, waited_for_rollouts_s=self._waiting.lap(), train_s=self._training.lap(),
            held_s=self._held.lap(),
        )  # fmt: skip
        metrics = dict(result.metrics) | self._measure(taken, timing)
        async with self._log_lock:
            await self._model.log(groups, split="train", metrics=metrics, step=result.step, row_id=pending.job_id)
        evaluator, is_last = self._evaluator, result.step >= self._last_step
        if result.trained and evaluator is not None and (is_last or result.step % self._inputs.evaluate_every == 0):
            await evaluator.start(result.step)
        await self._journal.step_ended(result.step, pending.numbers)
        evaluations: Sequence[PipelineEvaluation] = ()
        if evaluator is not None:
            if is_last:
                await evaluator.wait()
            evaluations, failed = evaluator.take()
            self._findings += failed
        findings, self._findings = [*result.findings, *self._findings], []
        if self._straggling is not None:
            findings.append(self._straggling)
            self._straggling = None
        staleness = [pending.step - one.plan.policy_version for one in taken]
        step = PipelineStep(
            number=result.step, trained=result.trained, groups=groups, metrics=metrics, findings=findings,
            reward=statistics.fmean(trajectory.reward for group in groups for trajectory in group),
            staleness_mean=statistics.fmean(staleness), staleness_max=max(staleness), timing=timing,
            evaluations=evaluations,
        )  # fmt: skip
        self._ended.append(replace(step, groups=()))  # not the rollouts, which would fill the memory
        if len(self._ended) > MAX_BARREN_STEPS + 1:
            first, second, *rest = self._ended
            best = replace(first, reward=max(first.reward, second.reward), trained=first.trained or second.trained)
            self._ended = [best, *rest]
        return step

    def _measure(self, taken: Sequence[UnderWay], timing: PipelineTiming) -> dict[str, float]:
        """Return the pipeline's metrics of a step: who waited, how rollouts ended."""
        flow = self._flow
        num_lost = 0 if flow is None else flow.take_num_lost()
        num_groups = len(taken) + num_lost
        rewards = ([trajectory.reward for group in one.groups for trajectory in group] for one in taken)
        num_useful = sum(max(own) - min(own) > SPREAD_TOLERANCE for own in rewards)
        # What failed has no step if its whole group was lost, so faults are counted since the step before. Those of
        # the policy are trained on, and rollouts that run ahead belong to later steps: they are the step's own.
        own = FaultWatch(max_rate=1.0)
        own.count_groups(group for one in taken for group in one.groups)
        metrics = {name: rate for name, rate in own.metrics().items() if name == POLICY_FAULT_RATE}
        metrics |= {name: rate for name, rate in self._faults.metrics().items() if name != POLICY_FAULT_RATE}
        metrics |= {
            "pipeline/groups_useful_share": num_useful / max(1, num_groups),
            "pipeline/groups_lost": float(num_lost),
            "pipeline/rollouts_run": float(num_groups * self._config.rollouts_per_group),
            "time/step_wall_s": timing.wall_s,
            "time/step_waited_for_rollouts_s": timing.waited_for_rollouts_s,
            "time/step_held_s": timing.held_s,
            "pipeline/trainer_idle_share": timing.waited_for_rollouts_s / timing.wall_s if timing.wall_s else 0.0,
        }
        if flow is not None:
            metrics["pipeline/groups_running"] = float(flow.num_running)
            metrics["pipeline/groups_waiting"] = float(len(flow.pace.finished))
        measure = getattr(self._inputs.after_each, "metrics", None)
        return metrics | (measure() if callable(measure) else {})

    async def _log(self, trajectories: Sequence[Trajectory], step: int) -> None:
        async with self._log_lock:
            await self._model.log(trajectories, split=SPLIT, step=step, row_id=f"pipeline-{SPLIT}-{step:06d}")


def is_solved(steps: Sequence[PipelineStep]) -> bool:
    """Whether the training ends because nothing was left to learn in its last `MAX_BARREN_STEPS` steps.

    Raises:
        TrainingError: nothing was ever learnt, or the reward was higher before: the policy may have collapsed.
    """
    if len(steps) < MAX_BARREN_STEPS or any(step.trained for step in steps[-MAX_BARREN_STEPS:]):
        return False
    last = steps[-1]
    if any(step.trained for step in steps) and last.reward >= max(step.reward for step in steps):
        logger.warning(
            "training ends at checkpoint %d: in the last %d steps the rollouts of each scenario all earned the same, "
            "%.3f on average and never more before. The task is solved as far as its reward can tell",
            last.number, MAX_BARREN_STEPS, last.reward,
        )  # fmt: skip
        return True
    raise TrainingError(
        f"{MAX_BARREN_STEPS} steps in a row had no group with differing rewards (mean reward {last.reward:.3f}). If "
        f"that is low the policy has collapsed: go back to an earlier checkpoint (newest: {last.number}) and lower the "
        "learning rate. If it is high the task is solved"
    )
