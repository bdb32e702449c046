"""Runs rollouts of a pipeline, each with a slot, a checkpoint, a seed and a time limit."""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art.asynchronous.source import RolloutOutcome, Source
from art.asynchronous.step import now
from art.client.arguments import describe
from art.client.rollout_context import RolloutContext, inside_rollout
from art.config.pipeline import PipelineConfig
from art.errors import ConfigError, TrajectoryError
from art.faults import FaultWatch
from art.gather import AfterEach, GatherContext, set_gather_context
from art.trajectory import PydanticException, Trajectory, cancel_and_wait, close_unstarted, infra_fault, within

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

    def __call__(self, model: Any, scenario: Any, *, rollout_index: int, seed: int) -> Awaitable[Any]:
        """Begin a rollout.

        Raises:
            ConfigError: the function returned something else than a coroutine.
        """
        values = {"rollout_index": rollout_index, "seed": seed}
        running = self._function(model, scenario, **{name: values[name] for name in self._extra})
        if not inspect.isawaitable(running):
            raise ConfigError(f"`rollout` returned {describe(running)}; make it an `async def`")
        return running


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out scenarios, and the function that runs a rollout of each."""

    scenarios: Sequence[Any]
    ids: Sequence[str]
    """Id of each scenario."""
    rollout: RolloutFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a pipeline was given to run."""

    source: Source
    rollout: RolloutFunction
    after_each: AfterEach | None
    held_out: HeldOut | None
    evaluate_every: int
    """Steps between two evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCall:
    """One rollout that is to be run."""

    function: RolloutFunction
    scenario: Any
    scenario_id: str
    order: tuple[int, int]
    """Number of its group, and index in it. Rollouts wait for a slot in this order: the oldest group first."""
    seed: int
    """Seed of its sampling, in [0, 2^63)."""
    step: int | None
    """Checkpoint that answers the rollout's requests; `None` for the newest at each token."""


class RolloutRunner:
    """Runs single rollouts of one model, and knows how long they take."""

    def __init__(
        self, model: TrainableModel[Any, Any], config: PipelineConfig, limiter: Concurrency, faults: FaultWatch
    ) -> None:
        self.model, self.config, self.limiter, self.faults = model, config, limiter, faults
        self.num_queued = 0
        """Rollouts that were planned and have no slot yet."""
        self.on_slot: Callable[[], None] = lambda: None
        """Called when a slot is free again."""
        self._began: dict[tuple[int, int], tuple[float, str]] = {}
        """Time at which each running rollout began and the id of its scenario."""
        self._seconds: deque[float] = deque(maxlen=256)
        """Seconds that the last rollouts took."""

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
            Exception: an error that ends every gather (`art.faults.FATAL`).
        """
        name = f"{self.model.project}/{self.model.name}"
        rollout = RolloutContext(model=name, step=call.step, seed=call.seed, switches=call.step is None)
        is_queued = True
        try:
            async with self.limiter.slot(call.order):
                is_queued = False
                self.num_queued -= 1
                began = now()
                self._began[call.order] = began, call.scenario_id
                try:
                    with set_gather_context(context), inside_rollout(rollout):
                        running = call.function(self.model, call.scenario, rollout_index=call.order[1], seed=call.seed)
                        result = await within(running, self.config.rollout_timeout_s)
                finally:
                    del self._began[call.order]
                    self._seconds.append(now() - began)
        except Exception as error:
            context.rollout_failed(error)
            return PydanticException.from_exception(error)
        finally:
            self.num_queued -= is_queued
            self.on_slot()
        if not isinstance(result, Trajectory):
            raise TrajectoryError(f"a rollout returned {describe(result)}; it must return an art.Trajectory")
        if (fault := infra_fault(result)) is not None:
            context.rollout_failed(fault)
            return PydanticException.from_exception(fault)
        context.rollout_finished(result)
        return result

    def stragglers(self, groups: Iterable[int], most: int = 3) -> list[str]:
        """Describe the running rollouts of some groups that have run longest, at most `most` of them."""
        numbers = set(groups)
        late = sorted((began, *order, name) for order, (began, name) in self._began.items() if order[0] in numbers)
        median = f", the median takes {statistics.median(self._seconds):.1f} s" if self._seconds else ""
        return [
            f"rollout {index} of scenario {name} (group {group}) has run for {now() - began:.0f} s{median}"
            for began, group, index, name in late[:most]
        ]


async def all_or_nothing(coroutines: list[Any]) -> None:
    """Run coroutines at once. The first error, or cancellation, cancels the others and waits for their end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel_and_wait(tasks)
        close_unstarted(coroutines)
        raise
