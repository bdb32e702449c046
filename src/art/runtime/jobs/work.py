"""What each kind of job implements (`Work`), and what it gets and returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from art.errors import ArtError, JobCancelledError
from art.gateway.record.usage_book import Pending
from art.protocol.training import JobProgress
from art.runtime.jobs.job import Entry, Job


class JobControl:
    """How a running job reports progress and learns that it was cancelled."""

    def __init__(self, report: Callable[[JobProgress], Any]) -> None:
        self.stop = asyncio.Event()
        """Set when the job has to end before it is done."""
        self.failure: ArtError | None = None
        """Why it has to end; `None` if it was cancelled."""
        self._report = report

    async def progress(self, phase: str, done: int, total: int) -> None:
        await self._report(JobProgress(phase=phase, done=done, total=total))

    def check(self) -> None:
        """Stop the job here if it was cancelled.

        Raises:
            JobCancelledError: the job was cancelled.
        """
        if self.stop.is_set():
            raise JobCancelledError("the job was cancelled")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job that succeeded."""

    changes: Mapping[str, Any]
    """New values of fields of the job's status."""
    published_step: int | None = None
    """The model's new step; `None` if the step did not change."""
    identity: str | None = None
    """Identity of the published checkpoint, by which one that is put in its place is noticed."""
    learnt_from: Sequence[str] = ()
    """Ids of the exchanges that the step learnt from."""
    used: Pending = field(default_factory=dict)
    """Usage that is stored in the transaction that records the result."""


class Work(Protocol):
    """Interface of a class that runs jobs. A job runs twice if the server dies before it records the result."""

    def lane(self, job: Entry) -> str:
        """Name the lane of a job, the queue in which it waits. Jobs of one lane run one at a time."""
        ...

    def from_step(self, job: Job) -> int | None:
        """Return the model's newest step, which is stored when the job first runs; `None` if the job needs none."""
        ...

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        """Do the job and return its result. `from_step` is the step that `from_step()` returned.

        Raises:
            JobCancelledError: the job was stopped and left nothing on disk.
            ArtError: the job failed.
        """
        ...
