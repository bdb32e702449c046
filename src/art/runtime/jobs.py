"""Runs training jobs, one at a time per base model, in the order they came; survives restarts.

    queued --begin--> running: trainer makes checkpoint n+1 --> engine publishes and proves it --> succeeded, model at
    n+1

Whatever dies on the way, the job runs again from the checkpoint it began with. The trainer recognises a checkpoint that
this job has already written and gives its recorded result, so nothing is trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from art.errors import ArtError, CorruptCheckpointError
from art.protocol.rpc import error_body
from art.protocol.training import JobStatus, WireError
from art.runtime.host import BaseModelHost
from art.runtime.registry import Job, RegisteredModel, Registry
from art.runtime.samples import close_ledger
from art.storage import checkpoints
from art.storage.layout import DataDir

logger = logging.getLogger(__name__)


class JobRunner:
    """Owns the running of jobs. `on_published` is told of each new step."""

    def __init__(
        self,
        registry: Registry,
        data_dir: DataDir,
        find: Callable[[str, str], tuple[RegisteredModel, BaseModelHost]],
        on_published: Callable[[RegisteredModel, int], None],
    ) -> None:
        self._registry = registry
        self._data_dir = data_dir
        self._find = find
        self._on_published = on_published
        self._queues: dict[str, asyncio.Queue[Job]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._finished: dict[str, asyncio.Event] = {}

    async def recover(self) -> None:
        """Queue what a server before this one left unfinished."""
        for job in await self._registry.unfinished_jobs():
            logger.info("job %s (%s of %s/%s) goes on after a restart", job.job_id, job.kind, job.project, job.name)
            self._enqueue(job)

    async def submit(self, job: Job) -> JobStatus:
        """Store and queue a job; a known id returns its status and does nothing else.

        Raises:
            ConflictError: the id is taken by a job with other content.
        """
        status = await self._registry.add_job(job)
        if status.state == "queued" and job.job_id not in self._finished:
            self._enqueue(job)
        return status

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        """Status of the job once it has ended, or after `timeout_s`.

        Raises:
            NotFoundError: no such job.
        """
        event = self._finished.get(job_id)
        if event is not None and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                pass  # the caller asks again
        return await self._registry.job_status(job_id)

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    def _enqueue(self, job: Job) -> None:
        self._finished[job.job_id] = asyncio.Event()
        model, _ = self._find(job.project, job.name)
        queue = self._queues.get(model.base_model)
        if queue is None:
            queue = self._queues[model.base_model] = asyncio.Queue()
            self._workers.append(
                asyncio.get_running_loop().create_task(self._work(queue), name=f"jobs-{model.base_model}")
            )
        queue.put_nowait(job)

    async def _work(self, queue: asyncio.Queue[Job]) -> None:
        while True:
            job = await queue.get()
            try:
                await self._run(job)
            except ArtError as error:
                logger.error("job %s failed: %s", job.job_id, error)
                await self._fail(job, error)
            except Exception as error:
                logger.exception("job %s failed unexpectedly", job.job_id)
                await self._fail(job, error)
            finally:
                self._finished.pop(job.job_id).set()

    async def _fail(self, job: Job, error: Exception) -> None:
        try:
            await self._registry.fail_job(job, WireError(**error_body(error)))
        except ArtError:
            logger.exception("the failure of job %s could not be recorded; it runs again after a restart", job.job_id)

    async def _run(self, job: Job) -> None:
        started = time.perf_counter()
        model, host = self._find(job.project, job.name)
        from_step = job.from_step if job.from_step is not None else model.step
        await self._registry.begin_job(job, from_step)
        paths = self._data_dir.model(job.project, job.name)
        source, target = paths.checkpoint(from_step), paths.checkpoint(from_step + 1)
        await asyncio.to_thread(_make_way, target, job.job_id)
        result = await host.train(
            job.kind, samples=job.payload["samples"], config=job.payload["config"], from_checkpoint=str(source),
            to_checkpoint=str(target), job_id=job.job_id,
        )  # fmt: skip
        step = from_step + 1
        ledger = job.payload["ledger"]
        accounts = close_ledger(ledger, result["metrics"]) if ledger is not None else {}
        published = await host.load(model.adapter_id(step), target)
        metrics = result["metrics"] | job.payload["metrics"] | accounts | published
        metrics["time/step_job_s"] = time.perf_counter() - started
        status = JobStatus(
            job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="succeeded", step=step,
            metrics=metrics, checkpoint_path=str(target),
        )  # fmt: skip
        await self._registry.finish_job(status)
        self._on_published(model, step)


def _make_way(target: Path, job_id: str) -> None:
    """Remove a checkpoint that another job wrote but never published (its publish failed)."""
    if not target.exists():
        return
    try:
        if checkpoints.read_state(target).job_id == job_id:
            return
    except CorruptCheckpointError:
        logger.warning("%s is incomplete", target)
    logger.warning("removing %s: it was never published", target)
    checkpoints.delete(target)
