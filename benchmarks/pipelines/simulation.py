"""Simulate an asynchronous training, for the benchmark `pipeline` and the picture of docs/asynchronous.md.

The real `Pace` decides, a simulated clock runs, and nothing is computed. The result is the ideal for given durations:
no overhead of Python, no noise, the engine as fast while it trains as otherwise (unless the machine alternates).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from art.asynchronous.pace import Pace

Action = Callable[[], None]


# -- what is simulated --


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a rollout: a request to the engine, and then a tool.

    Example: an answer that takes the engine 0.3 s when it is alone, and a web request of 2 s
        Turn(engine_s=0.3, tool_s=2.0)
    """

    engine_s: float
    """Seconds of the request if it is the engine's only one."""
    tool_s: float = 0.0
    """Seconds that the tool takes and that nobody else waits for, such as a request to another service."""
    worker_s: float = 0.0
    """Seconds in which the tool occupies one of the machine's tool workers, after `tool_s`."""


RolloutTurns = Sequence[Turn]
Workload = Callable[[int, int], RolloutTurns]
"""Returns the turns of rollout `index` of group `number`: `workload(number, index)`. It must return the same turns for
the same arguments, so that runs with different pacing meet the same latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speeds and limits of the machines of a run. `None` is no limit.

    Example: 64 requests at once make each of them 4.5 times slower than a single one
        Machine(train_s=1.5, slowdown=3.5 / 63)
    """

    train_s: float
    """Seconds of a training step, from its submission until requests use its checkpoint."""
    seats: int | None = None
    """Number of requests that the engine computes at once; further ones wait."""
    slowdown: float = 0.0
    """How much longer each request takes for every further request at once, as a share of its time alone."""
    tool_workers: int | None = None
    """Number of tools with `worker_s` that run at once."""
    alternates: bool = False
    """Whether the engine stops while a step is trained, as on a single GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is trained: the size of a step, the number of steps, and how old a rollout may be."""

    steps: int
    groups_per_step: int
    rollouts_per_group: int
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRollout:
    """When a rollout ran, in seconds from the beginning of the run."""

    group: int
    index: int
    policy_version: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """When a step was trained, in seconds from the beginning of the run, and on which groups."""

    step: int
    """Checkpoint that the step begins with."""
    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    """Staleness of each group."""
    began_s: float
    published_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run."""

    wall_s: float
    """Seconds until the last checkpoint is published."""
    engine_idle_share: float
    """Share of the time without a request in progress."""
    trainer_idle_share: float
    """Share of the time without a step under way."""
    staleness: Mapping[int, int]
    """Number of trained groups by their staleness."""
    steps: tuple[SimulatedStep, ...]
    rollouts: tuple[SimulatedRollout, ...]
    """In the order of their ends."""


# -- a run --


def simulate(workload: Workload, machine: Machine, schedule: Schedule) -> Simulated:
    """Simulate a run from step 0 until `schedule.steps` checkpoints are published.

    Example: rollouts of 2 s, steps of 1 s, no staleness: 10 steps take 30 s
        turns = [Turn(engine_s=2.0)]
        schedule = Schedule(steps=10, groups_per_step=8, rollouts_per_group=8, max_staleness=0)
        simulate(lambda number, index: turns, Machine(train_s=1.0), schedule).wall_s == 30.0
    """
    run = _Run(workload, machine, schedule)
    run.go_on()
    run.clock.run()
    wall_s = run.steps[-1].published_s
    return Simulated(
        wall_s=wall_s,
        engine_idle_share=1 - run.engine.busy_s / wall_s,
        trainer_idle_share=1 - sum(step.published_s - step.began_s for step in run.steps) / wall_s,
        staleness=Counter(staleness for step in run.steps for staleness in step.staleness),
        steps=tuple(run.steps),
        rollouts=tuple(run.rollouts),
    )


class _Run:
    """The state of one simulated run."""

    def __init__(self, workload: Workload, machine: Machine, schedule: Schedule) -> None:
        self.workload, self.machine, self.schedule = workload, machine, schedule
        self.clock = Clock()
        self.engine = WorkQueue(self.clock, seats=machine.seats, slowdown=machine.slowdown)
        self.tools = WorkQueue(self.clock, seats=machine.tool_workers)
        self.pace = Pace(
            groups_per_step=schedule.groups_per_step, max_staleness=schedule.max_staleness, last_step=schedule.steps
        )
        self.steps: list[SimulatedStep] = []
        self.rollouts: list[SimulatedRollout] = []
        self._left: dict[int, int] = {}

    def go_on(self) -> None:
        """Start a step if one can begin, and the groups that the pace allows."""
        self._train()
        while self.pace.may_start():
            number = self.pace.start()
            self._left[number] = self.schedule.rollouts_per_group
            for index in range(self.schedule.rollouts_per_group):
                self._start_rollout(number, index)

    def _start_rollout(self, number: int, index: int) -> None:
        began_s, version = self.clock.now, self.pace.version_of(number)

        def end() -> None:
            self.rollouts.append(
                SimulatedRollout(
                    group=number, index=index, policy_version=version, began_s=began_s, ended_s=self.clock.now
                )
            )
            self._left[number] -= 1
            if not self._left[number]:
                del self._left[number]
                self.pace.finish(number)
                self.go_on()

        self._play(self.workload(number, index), 0, end)

    def _play(self, turns: RolloutTurns, place: int, end: Callable[[], None]) -> None:
        if place == len(turns):
            end()
            return
        turn = turns[place]

        def go_on() -> None:
            self._play(turns, place + 1, end)

        def work() -> None:
            if turn.worker_s:
                self.tools.add(turn.worker_s, go_on)
            else:
                go_on()

        def wait() -> None:
            self.clock.after(turn.tool_s, work)

        self.engine.add(turn.engine_s, wait)

    def _train(self) -> None:
        if (numbers := self.pace.next_step()) is None:
            return
        step, began_s = self.pace.step, self.clock.now
        staleness = tuple(step - self.pace.version_of(number) for number in numbers)
        self.pace.begin(numbers)
        if self.machine.alternates:
            self.engine.pause()

        def publish() -> None:
            if self.machine.alternates:
                self.engine.resume()
            self.steps.append(
                SimulatedStep(
                    step=step, groups=tuple(numbers), staleness=staleness, began_s=began_s, published_s=self.clock.now
                )
            )
            self.pace.publish(step + 1)
            self.go_on()

        self.clock.after(self.machine.train_s, publish)


class Clock:
    """Calls actions in the order of their times. Actions of the same time are called in the order of their adding."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` when `seconds` more have passed."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), action))

    def run(self) -> None:
        """Call all actions, including those that they add."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class WorkQueue:
    """Work that shares a machine: up to `seats` pieces progress at once and at equal speed, the others wait in order.

    With n pieces at once, each takes `1 + slowdown * (n - 1)` times as long as alone. The progress of all running
    pieces is one number, `_progress_s`: a piece that begins at progress p with w seconds of work ends at p + w.
    """

    def __init__(self, clock: Clock, *, seats: int | None = None, slowdown: float = 0.0) -> None:
        self.busy_s = 0.0
        """Seconds in which at least one piece made progress."""
        self._clock = clock
        self._seats = math.inf if seats is None else seats
        self._slowdown = slowdown
        self._running: list[tuple[float, int, Action]] = []
        self._waiting: deque[tuple[float, Action]] = deque()
        self._progress_s = self._updated_s = 0.0
        self._is_paused = False
        self._count = itertools.count()
        self._plan = 0

    def add(self, seconds: float, done: Action) -> None:
        """Do work that takes `seconds` alone, then call `done`."""
        self._advance()
        self._waiting.append((seconds, done))
        self._fill()

    def pause(self) -> None:
        """Stop all progress until `resume`."""
        self._advance()
        self._is_paused = True
        self._schedule()

    def resume(self) -> None:
        self._advance()
        self._is_paused = False
        self._schedule()

    def _speed(self) -> float:
        if self._is_paused or not self._running:
            return 0.0
        return 1 / (1 + self._slowdown * (len(self._running) - 1))

    def _advance(self) -> None:
        """Bring the progress up to the present."""
        elapsed, speed = self._clock.now - self._updated_s, self._speed()
        self._progress_s += elapsed * speed
        self.busy_s += elapsed if speed else 0.0
        self._updated_s = self._clock.now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._seats:
            seconds, done = self._waiting.popleft()
            heapq.heappush(self._running, (self._progress_s + seconds, next(self._count), done))
        self._schedule()

    def _schedule(self) -> None:
        """Plan the next end. A plan that was made before is void."""
        self._plan += 1
        if speed := self._speed():
            plan, wait_s = self._plan, max(0.0, self._running[0][0] - self._progress_s) / speed
            self._clock.after(wait_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ends_at, _, done = heapq.heappop(self._running)
        self._progress_s = max(self._progress_s, ends_at)  # rounding must not leave a rest of the work
        self._fill()
        done()
