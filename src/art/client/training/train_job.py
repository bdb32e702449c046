"""A training step under way, as `train(..., wait=False)` returns it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from art.client.training.models import TrainResult
from art.protocol.training import JobStatus

logger = logging.getLogger(__name__)

_followed: set[asyncio.Task[TrainResult]] = set()
"""Tasks that follow jobs. An event loop alone would not keep them."""


class JobCalls(Protocol):
    """Interface of what knows the state of jobs."""

    async def job_status(self, job_id: str) -> JobStatus: ...

    async def cancel_job(self, job_id: str) -> JobStatus: ...


class TrainJob:
    """A training step that goes on while your program does something else. Await it for its `TrainResult`.

    It may be awaited several times, and from several tasks of the event loop in which it was made. A failure that
    nobody awaits is logged. If the program ends first, the job goes on at its server, or once that is started again;
    `backend.follow_train_job` returns it by its id.

        job = await backend.train(model, groups, wait=False)
        ...                     # the next rollouts
        result = await job
    """

    def __init__(self, client: JobCalls, job_id: str, result: Coroutine[Any, Any, TrainResult]) -> None:
        """
        Args:
            result: follows the job to its end. It is run as a task at once.
        """
        self.job_id = job_id
        self._client = client
        self._num_waiting = 0
        self._task = asyncio.create_task(result, name=f"train-job-{job_id}")
        _followed.add(self._task)
        self._task.add_done_callback(self._ended)

    def __await__(self) -> Generator[Any, Any, TrainResult]:
        return self._wait().__await__()

    async def _wait(self) -> TrainResult:
        self._num_waiting += 1
        try:
            return await asyncio.shield(self._task)  # who stops waiting does not stop the job
        finally:
            self._num_waiting -= 1

    def done(self) -> bool:
        """Whether the job has ended, well or badly, and this program knows it."""
        return self._task.done()

    async def status(self) -> JobStatus:
        """Ask the server for the state of the job, with its place in the queue and its progress."""
        return await self._client.job_status(self.job_id)

    async def cancel(self) -> None:
        """Stop the job; it ends after its current micro-batch. Awaiting it then raises `JobCancelledError`."""
        await self._client.cancel_job(self.job_id)

    def _ended(self, task: asyncio.Task[TrainResult]) -> None:
        _followed.discard(task)
        if task.cancelled():
            logger.info("training job %s is not followed any more; it goes on at the server", self.job_id)
        elif (error := task.exception()) is not None and not self._num_waiting:
            logger.error(
                "training job %s failed while nothing awaited it: %s: %s", self.job_id, type(error).__name__, error
            )

    def __repr__(self) -> str:
        return f"<TrainJob {self.job_id}{' done' if self.done() else ''}>"
