"""`art.pipeline`: training while further rollouts run.

pipeline = art.pipeline(model, scenarios=train_set, rollout=my_rollout, max_staleness=2)
async for step in pipeline.train(steps=500, learning_rate=1e-5):
    print(step.line())
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from art.asynchronous.run import PipelineRun
from art.asynchronous.running import HeldOut, Inputs, RolloutFunction
from art.asynchronous.source import Passes, make_source
from art.asynchronous.step import PipelineStep
from art.config import PipelineConfig, TrainConfig
from art.config.pipeline import check_staleness
from art.config.training import train_config
from art.errors import ConfigError
from art.faults import FaultWatch
from art.gather import AfterEach
from art.trajectory import Trajectory

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
    scenarios: Scenarios,
    rollout: Rollout,
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
    if faults is not None and "max_fault_rate" in chosen.model_fields_set:
        raise ConfigError("`max_fault_rate` does nothing beside `faults`; keep one", param="max_fault_rate")
    function = RolloutFunction(rollout)
    inputs = Inputs(
        source=make_source(scenarios, chosen), rollout=function, after_each=after_each,
        held_out=_read_held_out(evaluate, function), evaluate_every=every or EVALUATE_EVERY,
    )  # fmt: skip
    return Pipeline(model, chosen, inputs, faults or FaultWatch(chosen.max_fault_rate))


class Pipeline:
    """Trains one model while further rollouts run; `art.pipeline` makes it. Use it in one event loop."""

    def __init__(
        self, model: TrainableModel[Any, Any], config: PipelineConfig, inputs: Inputs, faults: FaultWatch
    ) -> None:
        self.model, self.config = model, config
        self._inputs, self._faults = inputs, faults
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


def _read_held_out(evaluate: Any, function: RolloutFunction) -> HeldOut | None:
    if evaluate is None:
        return None
    if isinstance(evaluate, tuple) and len(evaluate) == 2 and callable(evaluate[1]):
        evaluate, function = evaluate[0], RolloutFunction(evaluate[1])
    if not isinstance(evaluate, Sequence) or isinstance(evaluate, (str, bytes)):
        raise ConfigError("`evaluate` takes a list of held-out scenarios, or a pair of it and a rollout function")
    scenarios = Passes(evaluate, seed=0, shuffle=False)
    return HeldOut(scenarios=scenarios.scenarios, ids=scenarios.ids, rollout=function)
