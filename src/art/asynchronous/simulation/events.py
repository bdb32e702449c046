"""The clock of a simulation, and a queue of work that is done at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


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
