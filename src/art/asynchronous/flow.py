"""The rollouts of a pipeline: which groups of them run, and how each one runs.

Slots           how many rollouts run at once; the oldest group is next
RolloutRunner   runs single rollouts, each with a slot, a checkpoint, a seed and a time limit
Flow            the groups under way: starts them when the pace allows, and hands finished ones to the next step
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import statistics
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from art.asynchronous.journal import Journal, KeptGroup
from art.asynchronous.pace import Pace
from art.asynchronous.source import Inputs, Placed, PlannedGroup, RolloutFunction, RolloutOutcome, group_seed
from art.client.arguments import describe
from art.client.rollout_context import RolloutContext, derive_seed, inside_rollout
from art.config.pipeline import PipelineConfig
from art.errors import BudgetError, ConfigError, TrainingError, TrajectoryError
from art.faults import FaultWatch
from art.gather import GatherContext, finish_group, set_gather_context
from art.rollout_workers import Workers
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
    from art.model import TrainableModel

logger = logging.getLogger(__name__)

STARTS_PER_TURN = 16
"""Rollouts, or groups, that begin in one turn of the event loop. All rollouts at once would keep server and engine
waiting until the last has made its request, and then come to the engine one by one: `art demo` takes an eighth
longer."""
MAX_BARREN_STEPS = 5
"""Steps in a row without anything to learn after which the training ends: the policy collapsed or is perfect."""
REPORT_AFTER_S = 60.0
"""Seconds that a step waits for rollouts before the log names those that it waits for."""
FAULT_WINDOW = 64
"""Number of recent rollouts whose share of failures `max_fault_rate` bounds."""

Order: TypeAlias = tuple[int, int]
"""Number of the group, and index of the rollout in it."""


def now() -> float:
    """Return the time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


class Stopwatch:
    """Adds up the seconds in which something is the case."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def set(self, is_so: bool) -> None:
        """Say whether it is the case from now on."""
        if is_so == (self._since is not None):
            return
        if self._since is not None:
            self._total_s += now() - self._since
        self._since = now() if is_so else None

    def lap(self) -> float:
        """Return the seconds since the last call of `lap`, and begin again."""
        running = self._since is not None
        self.set(False)
        total_s, self._total_s = self._total_s, 0.0
        self.set(running)
        return total_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: it is the case during the body."""
        self.set(True)
        try:
            yield
        finally:
            self.set(False)


class Slots:
    """Limits how many rollouts run at once. It belongs to one event loop."""

    def __init__(self, limit: int | None) -> None:
        """
        Args:
            limit: most rollouts at once; `None` for no limit.
        """
        self.limit = limit
        self.num_running = 0
        """Rollouts that hold a slot."""
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []
        """Rollouts that wait for a slot, as a heap; those that were cancelled too, until their turn comes."""
        self._num_queued = 0
        self._will_fill = False
        """Whether `_fill` runs in the next turn of the event loop."""

    @asynccontextmanager
    async def slot(self, order: Order) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it during the body. Of those that wait, the lowest `order` is next."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_queued += 1
        heapq.heappush(self._waiting, (order, self._num_queued, turn))
        self._fill_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given its slot just before
                self.num_running -= 1
                self._fill_soon()
            raise
        try:
            yield
        finally:
            self.num_running -= 1
            self._fill_soon()

    def _fill_soon(self) -> None:
        if not self._will_fill:
            self._will_fill = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Give slots to those that wait, in this turn of the event loop and the next ones."""
        self._will_fill = False
        for _ in range(STARTS_PER_TURN):
            if not self._waiting or (self.limit is not None and self.num_running >= self.limit):
                return
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self.num_running += 1
                turn.set_result(None)
        self._fill_soon()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCall:
    """One rollout that is to be run."""

    function: RolloutFunction
    scenario: Any
    scenario_id: str
    order: Order
    """Number of its group, and index in it. Rollouts wait for a slot in this order: the oldest group first."""
    seed: int
    """Seed of its sampling, in [0, 2^63)."""
    step: int | None
    """Checkpoint that answers the rollout's requests; `None` for the newest at each token."""


class RolloutRunner:
    """Runs single rollouts of one model, and knows how long they take."""

    def __init__(
        self, model: TrainableModel[Any, Any], config: PipelineConfig, faults: FaultWatch, workers: Workers | None
    ) -> None:
        self.model, self.config, self.faults = model, config, faults
        limits = [config.max_concurrent, None if workers is None else workers.num_seats]
        self.slots = Slots(min((limit for limit in limits if limit is not None), default=None))
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
        limit = self.slots.limit
        return limit is None or self.slots.num_running + self.num_queued < limit

    async def run(self, call: RolloutCall, context: GatherContext) -> RolloutOutcome:
        """Run one rollout when it gets a slot. The caller has added it to `num_queued`.

        Args:
            context: counts how the rollout ends.

        Raises:
            TrajectoryError: it returned something else than a trajectory.
            Exception: an error that ends every gather (`art.faults.FATAL`).
        """
        name = f"{self.model.project}/{self.model.name}"
        rollout = RolloutContext(
            model=name, step=call.step, seed=call.seed, scenario=call.scenario_id, switches=call.step is None
        )
        is_queued = True
        try:
            async with self.slots.slot(call.order):
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

    def stragglers(self, most: int = 3) -> list[str]:
        """Describe the running rollouts that have run longest, at most `most` of them, without those of evaluations."""
        late = sorted((began, *order, name) for order, (began, name) in self._began.items() if order[0] >= 0)
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


@dataclass(slots=True, kw_only=True)
class UnderWay:
    """A group that was started and not trained yet."""

    plan: PlannedGroup
    groups: list[TrajectoryGroup] = field(default_factory=list)
    """What `after_each` has kept of it; empty while it runs."""


class Flow:
    """Starts groups, knows which of them run, and says which groups the next step takes."""

    def __init__(self, pace: Pace, inputs: Inputs, rollouts: RolloutRunner, journal: Journal, held: Stopwatch) -> None:
        """
        Args:
            held: measures the seconds in which the pace lets no further group start.
        """
        self.pace, self._inputs, self._rollouts, self._journal, self._held = pace, inputs, rollouts, journal, held
        self._next_position = journal.resumed.next_position or pace.next_number
        self._under_way: dict[int, UnderWay] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: deque[tuple[PlannedGroup, Placed]] = deque()
        """Plans of an earlier run's groups that were too stale to be trained, and their scenarios."""
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._budget: BudgetError | None = None
        self._lost_in_a_row = 0
        self._num_lost = 0
        rollouts.on_slot = self.fill

    @property
    def num_running(self) -> int:
        """Number of groups that run."""
        return len(self._tasks)

    def take_num_lost(self) -> int:
        """Return the number of groups that were lost since the last call."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    async def resume(self, kept: Sequence[KeptGroup]) -> None:
        """Take up the groups of an earlier run. Those that would be too stale are run again from their beginning.

        Raises:
            ConfigError: the stream has another scenario now at the position of a group.
        """
        for one in kept:
            plan, placed = one.plan, self._inputs.source.at(one.plan.position)
            if placed.scenario_id != plan.scenario_id:
                raise ConfigError(
                    f"the pipeline continues one in which position {plan.position} of `scenarios` was "
                    f"{plan.scenario_id!r}; now it is {placed.scenario_id!r}. Give it the same scenarios"
                )
            if not self.pace.restore(plan.number, plan.policy_version):
                logger.warning(
                    "group %d of an earlier run began with checkpoint %d and would be too stale now: its scenario %s "
                    "is run again", plan.number, plan.policy_version, plan.scenario_id,
                )  # fmt: skip
                self.pace.next_number = max(self.pace.next_number, plan.number + 1)
                self._again.append((plan, placed))  # it stays in the journal until the new group is there
            elif one.groups is None:
                self._launch(plan, placed, one if one.rollouts else None)
            else:
                self._under_way[plan.number] = UnderWay(plan=plan, groups=one.groups)
                self.pace.finish(plan.number)

    def fill(self) -> None:
        """Start groups as long as the pace allows and there is room for their rollouts, a few per turn of the loop."""
        config, has_ended = self._rollouts.config, self._failure is not None or self._budget is not None
        try:
            for num_started in itertools.count():
                if has_ended or not self._rollouts.has_room or not self.pace.may_start():
                    break
                if num_started == STARTS_PER_TURN:
                    asyncio.get_running_loop().call_soon(self.fill)
                    break
                self._rollouts.model.costs.check()
                replaces = None
                if self._again:
                    stale, placed = self._again.popleft()
                    position, replaces = stale.position, stale.number
                else:
                    position, self._next_position = self._next_position, self._next_position + 1
                    placed = self._inputs.source.at(position)
                plan = PlannedGroup(
                    number=self.pace.start(), position=position, scenario_id=placed.scenario_id,
                    pass_number=placed.pass_number, policy_version=self.pace.version,
                    seed=group_seed(config.seed, position), num_rollouts=config.rollouts_per_group,
                )  # fmt: skip
                self._launch(plan, placed, None, replaces)
        except BudgetError as error:
            self._end_over_budget(error)
        except Exception as error:
            self.fail(error)
        self._held.set(self.pace.is_held)

    async def next_step(self, on_wait: Callable[[list[str]], None]) -> list[int]:
        """Wait until the next step can begin, and return the numbers of its groups.

        Args:
            on_wait: called each `REPORT_AFTER_S` seconds with descriptions of the rollouts that have run longest.

        Raises:
            BudgetError: the budget is spent, and every group that was paid for is trained.
            Exception: the error of a rollout or of `after_each` that ends the training.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            numbers = self.pace.next_step() or (self.pace.last_groups() if self._budget is not None else None)
            if numbers:
                return numbers
            if self._budget is not None and not self._tasks:
                self._rollouts.model.costs.check()  # its message knows what was spent in the meantime
                raise self._budget
            self._changed.clear()
            try:
                async with asyncio.timeout(REPORT_AFTER_S):
                    await self._changed.wait()
            except TimeoutError:
                on_wait(self._rollouts.stragglers())

    def begin(self, numbers: list[int]) -> list[UnderWay]:
        """Begin the step that takes these groups, and return them."""
        self.pace.begin(numbers)
        taken = [self._under_way.pop(number) for number in numbers]
        self.fill()
        return taken

    def published(self, step: int, *, trained: bool) -> None:
        """Note that the step under way has ended, with the newest checkpoint `step`. Further groups may start."""
        if trained:
            self.pace.publish(step)
        else:
            self.pace.skip()
        self.fill()

    async def close(self) -> None:
        """Cancel what runs, and wait for its end."""
        self.fail(ConfigError("the pipeline was closed; call `train` again to go on"))
        await cancel_and_wait(self._tasks.values())

    def fail(self, error: Exception) -> None:
        """End the training with this error."""
        self._failure = self._failure or error
        self._changed.set()

    def _end_over_budget(self, error: BudgetError) -> None:
        if self._budget is None:
            logger.warning("no further rollout starts: %s", error)
        self._budget = self._budget or error
        self._changed.set()

    def _launch(self, plan: PlannedGroup, placed: Placed, kept: KeptGroup | None, replaces: int | None = None) -> None:
        self._under_way[plan.number] = UnderWay(plan=plan)
        self._rollouts.num_queued += plan.num_rollouts - (0 if kept is None else len(kept.rollouts))
        run = self._run(plan, placed, kept, replaces)
        self._tasks[plan.number] = asyncio.create_task(run, name=f"pipeline-group-{plan.number}")

    async def _run(self, plan: PlannedGroup, placed: Placed, kept: KeptGroup | None, replaces: int | None) -> None:
        """Run a group: its rollouts, then `after_each`. Each thing that ends is on disk before the next one begins.

        Args:
            kept: what an earlier run has finished of it; those rollouts are not repeated.
            replaces: number of an earlier group whose scenario this one runs again.
        """
        try:
            if kept is None:
                await self._journal.started(plan, replaces=replaces)
            groups = await self._run_rollouts(plan, placed, {} if kept is None else dict(kept.rollouts))
            await self._journal.group_ended(plan.number, groups)
            if groups:
                self._lost_in_a_row = 0
                self._under_way[plan.number].groups = groups
                self.pace.finish(plan.number)
            else:
                self._drop(plan.number)
                self._note_lost()
        except BudgetError as error:
            self._drop(plan.number)  # its rollouts stay in the journal: with a higher budget it is scored
            self._end_over_budget(error)
        except Exception as error:
            self.fail(error)
        finally:
            del self._tasks[plan.number]
            self.fill()
            self._changed.set()

    async def _run_rollouts(
        self, plan: PlannedGroup, placed: Placed, outcomes: dict[int, Trajectory | PydanticException]
    ) -> list[TrajectoryGroup]:
        """Run the rollouts that `outcomes` lacks. Return the groups that `after_each` keeps: none, one or several."""
        context = GatherContext(faults=self._rollouts.faults)

        async def run(index: int) -> None:
            call = RolloutCall(
                function=self._inputs.rollout, scenario=placed.scenario, scenario_id=plan.scenario_id,
                order=(plan.number, index), seed=derive_seed(plan.seed, index),
                step=plan.policy_version if self._rollouts.config.in_flight == "finish" else None,
            )  # fmt: skip
            outcomes[index] = await self._rollouts.run(call, context)
            await self._journal.rollout_ended(plan.number, index, outcomes[index])

        await all_or_nothing([run(index) for index in range(plan.num_rollouts) if index not in outcomes])
        ended = [outcomes[index] for index in sorted(outcomes)]
        group = TrajectoryGroup(
            [outcome for outcome in ended if isinstance(outcome, Trajectory)],
            exceptions=[outcome for outcome in ended if isinstance(outcome, PydanticException)],
            metadata={"scenario_id": plan.scenario_id},
        )
        with set_gather_context(context):
            return await finish_group(group, self._inputs.after_each)

    def _drop(self, number: int) -> None:
        self.pace.lose(number)
        del self._under_way[number]

    def _note_lost(self) -> None:
        self._num_lost += 1
        self._lost_in_a_row += 1
        config = self._rollouts.config  # more than a `FaultWatch` looks at, which knows better why rollouts fail
        most = max(MAX_BARREN_STEPS * config.groups_per_step, 1 + FAULT_WINDOW // config.rollouts_per_group)
        if self._lost_in_a_row >= most:
            raise TrainingError(
                f"the last {most} groups had nothing to train on: all their rollouts failed, or `after_each` dropped "
                "them. The log has the reasons"
            )
