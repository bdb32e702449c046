"""`art.pipeline`: training while further rollouts run.

pipeline = art.pipeline(model, scenarios=train_set, rollout=my_rollout, max_staleness=2)
async for step in pipeline.train(steps=500, learning_rate=1e-5):
    print(step.line())
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from art.asynchronous.evaluating import HeldOut
from art.asynchronous.pace import Pace
from art.asynchronous.plan import group_seed
from art.asynchronous.run import Inputs, Run
from art.asynchronous.running import RolloutFunction, check_engine
from art.asynchronous.source import Passes, make_source
from art.asynchronous.step import PipelineStep
from art.asynchronous.step_trainer import check_settings
from art.client.arguments import describe
from art.client.rollout_context import RolloutContext, inside_rollout
from art.config import PipelineConfig, TrainConfig
from art.config.staleness import check_staleness
from art.config.training import train_config
from art.errors import ConfigError, TrajectoryError
from art.gather.faults import FaultWatch
from art.gather.gather import AfterEach
from art.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art.model import TrainableModel

EVALUATE_EVERY = 20
"""Steps between two evaluations, unless the user says otherwise."""
Rollout = Callable[..., Awaitable[Trajectory]]
Scenarios = Sequence[Any] | Callable[[int], Any]


def pipeline(
    model: TrainableModel[Any, Any],
    config: PipelineConfig | None = None,
    *,
    scenarios: Scenarios | None = None,
    rollout: Rollout | None = None,
    after_each: AfterEach | None = None,
    evaluate: Sequence[Any] | tuple[Sequence[Any], Rollout] | None = None,
    every: int | None = None,
    faults: FaultWatch | None = None,
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
        faults: decides how many rollouts may fail, instead of `max_fault_rate`.
        settings: fields of `PipelineConfig` by name.

    Raises:
        ConfigError: a setting is unknown, wrong or without effect.
    """
    chosen = _read_config(config, settings)
    inputs = _read_inputs(chosen, (scenarios, rollout), after_each, (evaluate, every))
    if faults is not None and "max_fault_rate" in chosen.model_fields_set:
        raise ConfigError("`max_fault_rate` does nothing beside `faults`; keep one", param="max_fault_rate")
    return Pipeline(model, chosen, inputs, faults or FaultWatch(chosen.max_fault_rate))


class Pipeline:
    """Trains one model while further rollouts run; `art.pipeline` makes it. Use it in one event loop.

    `train` runs everything. A loop of your own uses `group`, `next_groups` and `published` instead: they admit groups
    by the same rule, and you run and train them.
    """

    def __init__(
        self, model: TrainableModel[Any, Any], config: PipelineConfig, inputs: Inputs | None, faults: FaultWatch
    ) -> None:
        self.model, self.config = model, config
        self._inputs, self._faults = inputs, faults
        self._slots = Slots(model, config)
        self._run: Run | None = None

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
        if self._inputs is None:
            raise ConfigError("`train` needs `scenarios` and `rollout`: pass both to `art.pipeline`")
        check_settings(dict(settings))
        chosen = train_config(config, settings)
        check_staleness(chosen, self.config.max_staleness)
        await self._begin_alone()
        await self.model.record_settings({"pipeline": {"steps": steps, **self.config.model_dump(mode="json")}})
        run = Run(self.model, self._inputs, self.config, self._faults, last_step=steps, train_config=chosen)
        try:
            async with run:
                self._run = run
                self.model.backend().close_with(self, self.close)
                step = await run.begin() or await run.next_step()
                while step is not None:
                    yield step
                    step = await run.next_step()
        finally:
            self._run = None

    def group(self, scenario: Any = None) -> AbstractAsyncContextManager[GroupSlot]:
        """Context manager for a loop of your own: wait until a group may start, and run it in the body.

        Inside the body, requests to the model are answered by the newest checkpoint at its beginning. The body passes
        the group to `slot.finish`; if it does not, the group counts as lost and its place is free again.

            async with pipeline.group(scenario) as slot:
                slot.finish(await art.TrajectoryGroup(rollout(model, scenario) for _ in range(8)))
        """
        return self._slots.group(scenario)

    async def next_groups(self) -> list[TrajectoryGroup]:
        """Wait for the groups of the next step, for a loop of your own: train them, then call `published`.

        Raises:
            ConfigError: the step before was not published.
        """
        return await self._slots.next_groups()

    def published(self, step: int) -> None:
        """Note the step that training the groups of `next_groups` has led to, for a loop of your own.

        Raises:
            ConfigError: it is not the step that these groups could lead to.
        """
        self._slots.published(step)

    async def close(self) -> None:
        """Cancel the rollouts that run, and wait for their end. A later call of `train` goes on from there."""
        if self._run is not None:
            await self._run.close()

    async def _begin_alone(self) -> None:
        """Wait for the end of a loop over `train` that was just left.

        Raises:
            ConfigError: another one goes on.
        """
        for _ in range(3):  # Python ends a generator that nobody iterates any more in the next turns of the loop
            await asyncio.sleep(0)
        while self._run is not None and self._run.is_closing:
            await asyncio.sleep(0.01)
        if self._run is not None:
            raise ConfigError("this pipeline trains already; leave that loop first, or await `pipeline.close()`")


def _read_config(config: PipelineConfig | None, settings: dict[str, Any]) -> PipelineConfig:
    if config is not None and not isinstance(config, PipelineConfig):
        raise ConfigError(f"`config` takes an art.config.PipelineConfig(...), got {config!r}", param="config")
    whole = {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}
    if twice := sorted(whole.keys() & settings.keys()):
        raise ConfigError(f"{', '.join(twice)}: given twice, by `config` and by itself; keep one")
    return PipelineConfig(**whole, **settings)


def _read_inputs(
    config: PipelineConfig,
    what: tuple[Scenarios | None, Rollout | None],
    after_each: AfterEach | None,
    evaluation: tuple[Any, int | None],
) -> Inputs | None:
    """Check what a pipeline was given to run; `None` if that is nothing, for a loop of one's own."""
    (scenarios, rollout), (evaluate, every) = what, evaluation
    if evaluate is None and every is not None:
        raise ConfigError("`every` does nothing without `evaluate`, held-out scenarios", param="every")
    if every is not None and every < 1:
        raise ConfigError(f"`every` must be at least 1, got {every}", param="every")
    if scenarios is None and rollout is None and after_each is None and evaluate is None:
        return None
    if scenarios is None or rollout is None:
        raise ConfigError("`scenarios` and `rollout` go together: pass both, or neither for a loop of your own")
    function = RolloutFunction(rollout)
    return Inputs(
        source=make_source(scenarios, config), rollout=function, after_each=after_each,
        held_out=_read_held_out(evaluate, function), evaluate_every=every or EVALUATE_EVERY,
    )  # fmt: skip


def _read_held_out(evaluate: Any, function: RolloutFunction) -> HeldOut | None:
    if evaluate is None:
        return None
    if isinstance(evaluate, tuple) and len(evaluate) == 2 and callable(evaluate[1]):
        evaluate, function = evaluate[0], RolloutFunction(evaluate[1])
    if not isinstance(evaluate, Sequence) or isinstance(evaluate, (str, bytes)):
        raise ConfigError("`evaluate` takes a list of held-out scenarios, or a pair of it and a rollout function")
    scenarios = Passes(evaluate, seed=0, shuffle=False)
    return HeldOut(scenarios=scenarios.scenarios, ids=scenarios.ids, rollout=function)


# -- admission of groups for loops of one's own --


@dataclass(slots=True, kw_only=True)
class GroupSlot:
    """The permission to run one group."""

    number: int
    """Number of the group in the order of starting, from 0."""
    policy_version: int
    """Step of the checkpoint that answers requests inside the body, unless in_flight="switch"."""
    seed: int
    """Seed of the group, for randomness of your own."""
    scenario: Any = None
    group: TrajectoryGroup | None = field(default=None, init=False)
    """What was passed to `finish`."""

    def finish(self, group: TrajectoryGroup) -> None:
        """Hand over the finished group, to be trained by a later step.

        Raises:
            TrajectoryError: it is something else than a group.
        """
        if not isinstance(group, TrajectoryGroup):
            raise TrajectoryError(f"`finish` takes a finished TrajectoryGroup, got {describe(group)}")
        self.group = group


class Slots:
    """Lets groups start as the pace allows, for a loop of one's own."""

    def __init__(self, model: TrainableModel[Any, Any], config: PipelineConfig) -> None:
        self._model, self._config = model, config
        self._pace: Pace | None = None
        self._groups: dict[int, TrajectoryGroup] = {}
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def group(self, scenario: Any) -> AsyncGenerator[GroupSlot]:
        """Wait until a group may start, and run it in the body."""
        pace = await self._get_pace()
        await self._until(pace.may_start)
        slot = GroupSlot(
            number=pace.start(), policy_version=pace.version, scenario=scenario,
            seed=group_seed(self._config.seed, pace.next_number - 1),
        )  # fmt: skip
        step = slot.policy_version if self._config.in_flight == "finish" else None
        name = f"{self._model.project}/{self._model.name}"
        context = RolloutContext(model=name, step=step, seed=slot.seed, switches=step is None)
        try:
            with inside_rollout(context):
                yield slot
        finally:
            self._end(pace, slot)

    async def next_groups(self) -> list[TrajectoryGroup]:
        """Wait for the groups of the next step, and begin it."""
        pace = await self._get_pace()
        if pace.is_training:
            raise ConfigError("call `published` with the step of the last training before you ask for further groups")
        await self._until(lambda: pace.next_step() is not None)
        numbers = pace.next_step() or []
        pace.begin(numbers)
        return [self._groups.pop(number) for number in numbers]

    def published(self, step: int) -> None:
        """Note the step that the training of these groups has led to."""
        if self._pace is None:
            raise ConfigError("`published` comes after `next_groups` and the training of what it returned")
        if step == self._pace.version and self._pace.is_training:
            self._pace.skip()
        else:
            self._pace.publish(step)
        self._changed.set()

    async def _get_pace(self) -> Pace:
        if self._pace is None:
            config, version = self._config, await check_engine(self._model, self._config)
            self._pace = self._pace or Pace(
                groups_per_step=config.groups_per_step, max_staleness=config.max_staleness, step=version
            )
        return self._pace

    def _end(self, pace: Pace, slot: GroupSlot) -> None:
        if slot.group is None or not len(slot.group):
            pace.lose(slot.number)
        else:
            self._groups[slot.number] = slot.group
            pace.finish(slot.number)
        self._changed.set()

    async def _until(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            self._changed.clear()
            await self._changed.wait()
