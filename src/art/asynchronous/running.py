"""Runs groups of rollouts: slots, checkpoints and seeds, time limits, the journal, and `after_each`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art.asynchronous.journal import Journal, KeptGroup
from art.asynchronous.plan import GroupPlan, RolloutOutcome, RolloutPlan
from art.asynchronous.watch import RolloutClock
from art.client.arguments import describe
from art.client.rollout_context import RolloutContext, inside_rollout
from art.config.pipeline import PipelineConfig
from art.errors import ConfigError, TrajectoryError
from art.gather import GatherContext, finish_group, set_gather_context
from art.gather.faults import FaultWatch
from art.gather.gather import AfterEach
from art.trajectory import (
    PydanticException,
    Trajectory,
    TrajectoryGroup,
    cancel_and_wait,
    close_unstarted,
    infra_fault,
    within,
)

if TYPE_CHECKING:
    from art.asynchronous.concurrency import Concurrency
    from art.model import TrainableModel

_EXTRA = ("rollout_index", "seed")
"""Parameters that a rollout function may have besides the model and the scenario."""


class RolloutFunction:
    """The user's function `rollout(model, scenario)`, which may also have parameters `rollout_index` and `seed`."""

    def __init__(self, function: Callable[..., Awaitable[Trajectory]]) -> None:
        """
        Raises:
            ConfigError: it is not a function of a model and a scenario.
        """
        expected = "expected `async def rollout(model, scenario)`, which may also take `rollout_index` and `seed`"
        try:
            parameters = inspect.signature(function).parameters
            extra = [name for name in _EXTRA if name in parameters]
            inspect.signature(function).bind(None, None, **dict.fromkeys(extra))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`rollout` cannot be called with a model and a scenario ({error}); {expected}") from None
        self._function, self._extra = function, extra

    def __call__(self, model: Any, scenario: Any, rollout: RolloutPlan) -> Awaitable[Any]:
        """Begin a rollout.

        Raises:
            ConfigError: the function returned something else than a coroutine.
        """
        values = {"rollout_index": rollout.index, "seed": rollout.seed}
        running = self._function(model, scenario, **{name: values[name] for name in self._extra})
        if not inspect.isawaitable(running):
            raise ConfigError(f"`rollout` returned {describe(running)}; make it an `async def`")
        return running


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCall:
    """One call of the user's function."""

    function: RolloutFunction
    scenario: Any
    scenario_id: str
    plan: RolloutPlan
    step: int | None
    """Checkpoint that answers the rollout's requests; `None` for the newest at each token."""


class RolloutRunner:
    """Runs single rollouts of one model, with a checkpoint and a seed for the requests of each."""

    def __init__(
        self, model: TrainableModel[Any, Any], config: PipelineConfig, limiter: Concurrency, faults: FaultWatch
    ) -> None:
        self.model, self.config, self.limiter, self.faults = model, config, limiter, faults
        self.clock = RolloutClock()
        self.num_queued = 0
        """Rollouts that were planned and have no slot yet."""
        self.on_slot: Callable[[], None] = lambda: None
        """Called when a slot is free again."""

    @property
    def has_room(self) -> bool:
        """Whether a rollout that is planned now would get a slot at once."""
        limit = self.limiter.limit
        return limit is None or self.limiter.num_running + self.num_queued < limit

    async def run(self, call: RolloutCall, context: GatherContext) -> RolloutOutcome:
        """Run one rollout when it gets a slot. The caller has added it to `num_queued`.

        Args:
            context: counts how the rollout ends.

        Raises:
            TrajectoryError: it returned something else than a trajectory.
            Exception: an error that ends every gather (`art.gather.faults.FATAL`).
        """
        is_queued = True
        try:
            async with self.limiter.slot(call.plan.order):
                is_queued = False
                self.num_queued -= 1
                with (
                    self.clock.measure(call.plan.order, call.scenario_id),
                    set_gather_context(context),
                    inside_rollout(self._context(call)),
                ):
                    running = call.function(self.model, call.scenario, call.plan)
                    result = await within(running, self.config.rollout_timeout_s)
        except Exception as error:
            context.rollout_failed(error)
            return PydanticException.from_exception(error)
        finally:
            self.num_queued -= is_queued
            self.on_slot()
        return _outcome_of(result, context)

    def _context(self, call: RolloutCall) -> RolloutContext:
        name = f"{self.model.project}/{self.model.name}"
        return RolloutContext(model=name, step=call.step, seed=call.plan.seed, switches=call.step is None)


def _outcome_of(result: Any, context: GatherContext) -> RolloutOutcome:
    if not isinstance(result, Trajectory):
        raise TrajectoryError(f"a rollout returned {describe(result)}; it must return an art.Trajectory")
    if (fault := infra_fault(result)) is not None:
        context.rollout_failed(fault)
        return PydanticException.from_exception(fault)
    context.rollout_finished(result)
    return result


class GroupRunner:
    """Runs the rollouts of a group and passes it to `after_each`, and writes down each thing that ends."""

    def __init__(
        self,
        rollouts: RolloutRunner,
        function: RolloutFunction,
        after_each: AfterEach | None,
        journal: Journal,
    ) -> None:
        self.rollouts, self.journal = rollouts, journal
        self._function, self._after_each = function, after_each

    async def run(self, plan: GroupPlan, scenario: Any, kept: KeptGroup | None = None) -> list[TrajectoryGroup]:
        """Run a group, and return the groups that `after_each` keeps of it: none, one or several.

        The caller has added `num_to_run(plan, kept)` to the rollouts that are queued.

        Args:
            kept: what an earlier run has finished of it; those rollouts are not repeated.
        """
        outcomes = dict(kept.rollouts) if kept is not None else {}
        context = GatherContext(faults=self.rollouts.faults)

        async def run(index: int) -> None:
            call = RolloutCall(
                function=self._function, scenario=scenario, scenario_id=plan.scenario_id, plan=plan.rollout(index),
                step=plan.policy_version if self.rollouts.config.in_flight == "finish" else None,
            )  # fmt: skip
            outcomes[index] = await self.rollouts.run(call, context)
            await self.journal.rollout_ended(plan.number, index, outcomes[index])

        await all_or_nothing([run(index) for index in range(plan.num_rollouts) if index not in outcomes])
        ended = [outcomes[index] for index in sorted(outcomes)]
        group = TrajectoryGroup(
            [outcome for outcome in ended if isinstance(outcome, Trajectory)],
            exceptions=[outcome for outcome in ended if isinstance(outcome, PydanticException)],
            metadata={"scenario_id": plan.scenario_id},
        )
        with set_gather_context(context):
            return await finish_group(group, self._after_each)

    def num_to_run(self, plan: GroupPlan, kept: KeptGroup | None) -> int:
        """Number of the group's rollouts that are not run yet."""
        return plan.num_rollouts - (0 if kept is None else len(kept.rollouts))


async def all_or_nothing(coroutines: list[Any]) -> None:
    """Run coroutines at once. The first error, or cancellation, cancels the others and waits for their end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(coroutines)
        raise


async def check_engine(model: TrainableModel[Any, Any], config: PipelineConfig) -> int:
    """Return the newest checkpoint of a model, whose engine must serve as many at once as rollouts may ask for.

    Raises:
        ConfigError: the engine serves fewer checkpoints at a time.
    """
    status = await model.backend().get_status(model)
    num_needed, num_served = config.max_staleness + 1, status.steps_at_once
    if config.in_flight == "finish" and num_served is not None and num_needed > num_served:
        raise ConfigError(
            f"with max_staleness={config.max_staleness}, rollouts ask for {num_needed} checkpoints of "
            f"{model.project}/{model.name} at a time, and its engine serves {num_served}, because whole weights are "
            f'trained or merged; set in_flight="switch", or max_staleness={num_served - 1}',
            param="in_flight",
        )
    return status.step
