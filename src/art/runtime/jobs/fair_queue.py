"""Whose turn it is: projects that wait for the same processes take turns, and inside one the first to come is first.

The project whose last turn is longest ago goes next; one that never had a turn goes before all others. So a project
with a hundred queued steps holds up another one for one step at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping


class FairQueue:
    """Job ids by project. `last_turns` are those of an earlier run, as numbers that grow with time."""

    def __init__(self, last_turns: Mapping[str, float] | None = None) -> None:
        order = sorted((last_turns or {}).items(), key=lambda turn: turn[1])
        self._last_turn = {project: number for number, (project, _) in enumerate(order, 1)}
        self._next_turn = len(order) + 1
        self._waiting: dict[str, deque[str]] = {}
        """Only projects with jobs, in the order in which they came."""

    def put(self, project: str, job_id: str) -> None:
        self._waiting.setdefault(project, deque()).append(job_id)

    def take(self) -> str | None:
        """The next job, which is out of the queue now; `None` if there is none."""
        job_id = next(self._in_order(), None)
        if job_id is not None:
            project = next(project for project, jobs in self._waiting.items() if jobs[0] == job_id)
            self._last_turn[project], self._next_turn = self._next_turn, self._next_turn + 1
            self.remove(job_id)
        return job_id

    def remove(self, job_id: str) -> bool:
        """Whether it was waiting."""
        for project, jobs in self._waiting.items():
            if job_id in jobs:
                jobs.remove(job_id)
                if not jobs:
                    del self._waiting[project]
                return True
        return False

    def places(self) -> dict[str, int]:
        """1 is the next. Jobs that come later can change them, but nobody is overtaken twice by the same project."""
        return {job_id: place for place, job_id in enumerate(self._in_order(), 1)}

    def _in_order(self) -> Iterator[str]:
        """As they would be taken if no more came."""
        left = {project: deque(jobs) for project, jobs in self._waiting.items()}
        last_turn, turn = dict(self._last_turn), self._next_turn
        while left:
            project = min(left, key=lambda project: last_turn.get(project, 0))  # of equals the one that came first
            last_turn[project], turn = turn, turn + 1
            yield left[project].popleft()
            if not left[project]:
                del left[project]
