"""Simulate an asynchronous training: the real `Pace` decides, a simulated clock runs, and nothing is computed.

The result is the ideal for given durations: no overhead of Python, no noise, the engine as fast while it trains as
otherwise (unless the machine alternates).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from art.asynchronous.pace import Pace
from art.asynchronous.simulation.events import Clock, WorkQueue
from art.asynchronous.simulation.machine import Machine
from art.asynchronous.simulation.workload import RolloutTurns, Workload


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
        self._waiting: list[tuple[int, int]] = []
        self._num_running = 0

    def go_on(self) -> None:
        """Start a step if one can begin, and the groups that the pace allows."""
        self._train()
        while self.pace.may_start():
            number = self.pace.start()
            self._left[number] = self.schedule.rollouts_per_group
            for index in range(self.schedule.rollouts_per_group):
                heapq.heappush(self._waiting, (number, index))
        self._start_rollouts()

    def _start_rollouts(self) -> None:
        limit = self.machine.max_concurrent
        while self._waiting and (limit is None or self._num_running < limit):
            self._num_running += 1
            self._start_rollout(*heapq.heappop(self._waiting))

    def _start_rollout(self, number: int, index: int) -> None:
        began_s, version = self.clock.now, self.pace.version_of(number)

        def end() -> None:
            self._num_running -= 1
            self.rollouts.append(
                SimulatedRollout(
                    group=number, index=index, policy_version=version, began_s=began_s, ended_s=self.clock.now
                )
            )
            self._left[number] -= 1
            if self._left[number]:
                self._start_rollouts()
            else:
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

        self.clock.after(self.machine.step_s, publish)
