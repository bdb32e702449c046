"""A queue in which projects take turns. Within a project, jobs run in the order in which they came.

The project whose last turn is longest ago goes next; a project that never had a turn goes before all others. So a
project with a hundred queued steps delays another project by at most one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping


class FairQueue:
    """Queues job ids. The projects that they belong to take turns."""

    def __init__(self, last_turns: Mapping[str, float] | None = None) -> None:
        """`last_turns` has the time of each project's last turn before a restart."""
        order = sorted((last_turns or {}).items(), key=lambda turn: turn[1])
        self._last_turn = {project: number for number, (project, _) in enumerate(order, 1)}
        self._next_turn = len(order) + 1
        self._waiting: dict[str, deque[str]] = {}
        """The waiting jobs of each project that has some, in the order in which they came."""

    def put(self, project: str, job_id: str) -> None:
        self._waiting.setdefault(project, deque()).append(job_id)

    def take(self) -> str | None:
        """Remove and return the next job; `None` if no job waits."""
        project, job_id = next(self._in_order(), ("", None))
        if job_id is not None:
            self._last_turn[project], self._next_turn = self._next_turn, self._next_turn + 1
            self.remove(job_id)
        return job_id

    def remove(self, job_id: str) -> bool:
        """Remove a job; returns whether it was waiting."""
        for project, jobs in self._waiting.items():
            if job_id in jobs:
                jobs.remove(job_id)
                if not jobs:
                    del self._waiting[project]
                return True
        return False

    def places(self) -> dict[str, int]:
        """The place of each waiting job; 1 is the next. A later job can overtake one, but each project only once."""
        return {job_id: place for place, (_, job_id) in enumerate(self._in_order(), 1)}

    def _in_order(self) -> Iterator[tuple[str, str]]:
        """Project and id of each job, in the order in which the jobs would run if no more came."""
        left = {project: deque(jobs) for project, jobs in self._waiting.items()}
        last_turn, turn = dict(self._last_turn), self._next_turn
        while left:
            project = min(left, key=lambda project: last_turn.get(project, 0))  # the first one among equals
            last_turn[project], turn = turn, turn + 1
            yield project, left[project].popleft()
            if not left[project]:
                del left[project]
