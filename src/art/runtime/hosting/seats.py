"""The seats of an engine. Requests wait here for one; projects take turns, and within a project its keys.

A seat is one completion that the engine computes, so a request with `n=4` needs four. The engine samples a token for
every seat in each step, so projects with equally many seats get equally many tokens.

    a free seat goes to  the project with the fewest seats,
                         in it to the key with the fewest seats,     in a tie to the one whose last turn is longest ago,
                         of its requests to the oldest

The engine has more seats than requests of one key can fill. The spare ones go to keys that hold fewer seats than are
free, so that a newcomer need not wait until a long answer to somebody else ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from art.engine import Sender
from art.errors import OverloadedError

SEATS_PER_SPARE = 8
"""There is one spare seat for this many others."""


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one key of a project."""

    num_seats: int = 0
    last_turn: int = 0
    """Number of the turn in which it last got a seat."""
    num_waiting: int = 0
    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    """One for each waiting request, oldest first. That of a client that has hung up is cancelled."""


@dataclass(slots=True, eq=False)
class _Project:
    """The requests of one project."""

    num_seats: int = 0
    last_turn: int = 0
    num_waiting: int = 0
    lines: dict[str, _Line] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSeats:
    """The seats of an engine, as one project sees them."""

    held: int
    """Seats that its requests hold."""
    held_by_all: int
    """Seats that requests of all projects hold."""
    waiting: int
    """Its requests that wait for a seat."""
    free: int
    """Further seats that its requests could take now, without the spare ones."""


class Seats:
    """Hands out the seats of one engine. It belongs to one event loop."""

    def __init__(self, num_seats: int, max_waiting: int) -> None:
        """
        Args:
            num_seats: seats that requests of one key can fill.
            max_waiting: requests of one project that may wait.
        """
        self.num_waiting = 0
        """Requests that wait for a seat."""
        self._num_seats = num_seats
        self._num_free = with_spare(num_seats)
        self._num_spare = self._num_free - num_seats
        self._max_waiting = max_waiting
        self._projects: dict[str, _Project] = {}
        """Projects and lines that hold a seat or wait for one."""
        self._turn_numbers = itertools.count(1)

    @asynccontextmanager
    async def taken(self, sender: Sender) -> AsyncGenerator[None]:
        """Wait for a seat, and hold it during the body.

        Raises:
            OverloadedError: too many requests of the project wait already.
        """
        project = self._projects.setdefault(sender[0], _Project())
        line = project.lines.setdefault(sender[1], _Line())
        try:
            await self._take(sender[0], project, line)
            try:
                yield
            finally:
                self._give_back(project, line)
        finally:
            self._forget(sender, project, line)

    async def _take(self, name: str, project: _Project, line: _Line) -> None:
        if not line.num_waiting and self._may_sit(line):
            self._sit(project, line)
            return
        if project.num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{project.num_waiting} requests of project {name} wait for the engine, which is the limit "
                "(`max_waiting` of the engine's settings); try again later"
            )
        turn = asyncio.get_running_loop().create_future()
        line.turns.append(turn)
        self._count_waiting(project, line, 1)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._count_waiting(project, line, -1)
            else:  # it was given its seat just before its client hung up
                self._give_back(project, line)
            raise

    def of(self, project: str) -> ProjectSeats:
        """Count the seats that `project` holds, waits for and could take."""
        state = self._projects.get(project, _Project())
        return ProjectSeats(
            held=state.num_seats,
            held_by_all=with_spare(self._num_seats) - self._num_free,
            waiting=state.num_waiting,
            free=max(0, self._num_free - self._num_spare),
        )

    def resize(self, num_seats: int) -> None:
        """Change the number of seats that requests of one key can fill. Taken seats stay taken."""
        self._num_free += with_spare(num_seats) - with_spare(self._num_seats)
        self._num_spare = with_spare(num_seats) - num_seats
        self._num_seats = num_seats
        self._fill()

    def _give_back(self, project: _Project, line: _Line) -> None:
        self._num_free += 1
        project.num_seats -= 1
        line.num_seats -= 1
        self._fill()

    def _fill(self) -> None:
        """Give free seats to waiting requests."""
        while self.num_waiting and (place := self._next()) is not None:
            project, line = place
            self._count_waiting(project, line, -1)
            self._sit(project, line)
            line.turns.popleft().set_result(None)

    def _next(self) -> tuple[_Project, _Line] | None:
        """The line whose turn it is; `None` if there is no seat for any."""
        lines = (
            (project, line)
            for project in self._projects.values()
            for line in project.lines.values()
            if _has_waiting(line) and self._may_sit(line)
        )
        return min(lines, key=_rank, default=None)

    def _may_sit(self, line: _Line) -> bool:
        return self._num_free > self._num_spare or line.num_seats < self._num_free

    def _sit(self, project: _Project, line: _Line) -> None:
        self._num_free -= 1
        project.num_seats += 1
        line.num_seats += 1
        project.last_turn = line.last_turn = next(self._turn_numbers)

    def _count_waiting(self, project: _Project, line: _Line, step: int) -> None:
        self.num_waiting += step
        project.num_waiting += step
        line.num_waiting += step

    def _forget(self, sender: Sender, project: _Project, line: _Line) -> None:
        if not line.num_seats and not line.num_waiting:
            project.lines.pop(sender[1], None)
            if not project.lines:
                self._projects.pop(sender[0], None)


def with_spare(num_seats: int) -> int:
    """The seats that an engine needs if the requests of one key may fill `num_seats`."""
    return num_seats + -(-num_seats // SEATS_PER_SPARE)


def without_spare(num_seats: int) -> int:
    """The seats that requests of one key may fill in an engine that has `num_seats`, at least 1."""
    return max(1, num_seats * SEATS_PER_SPARE // (SEATS_PER_SPARE + 1))


def _has_waiting(line: _Line) -> bool:
    while line.turns and line.turns[0].cancelled():
        line.turns.popleft()
    return bool(line.turns)


def _rank(place: tuple[_Project, _Line]) -> tuple[int, int, int, int]:
    project, line = place
    return project.num_seats, project.last_turn, line.num_seats, line.last_turn
