"""Runs training jobs, one at a time per base model, in the order they came; survives restarts.

    queued --begin--> running: trainer makes checkpoint n+1 --> engine publishes and proves it --> succeeded, model at
    n+1

Whatever dies on the way, the job runs again from the checkpoint it began with. The trainer recognises a checkpoint that
this job has already written and gives its recorded result, so nothing is trained twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from art.errors import ArtError, CorruptCheckpointError, TrainingError
from art.protocol.rpc import error_body
from art.protocol.training import JobStatus, WireError
from art.runtime.host import BaseModelHost
from art.runtime.plan import close_ledger
from art.runtime.registry import Job, RegisteredModel, Registry
from art.runtime.waits import waiting
from art.storage import checkpoints
from art.storage.layout import DataDir
from art.trainer.findings import find_findings

logger = logging.getLogger(__name__)


RECORD_AGAIN_S = 5.0
"""Between attempts to record a failure."""
IDLE_TIMEOUT_S = 24 * 3600.0
"""Longest wait for the jobs of a model to end, as the client's for a single one."""


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A queued or running job."""

    model: tuple[str, str]
    """Project and name."""
    recovered: bool
    """A server before this one was given it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)


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
        self._unfinished: dict[str, _Unfinished] = {}
        self._unrecorded: dict[str, JobStatus] = {}
        """Failures that the database would not take, e.g. because the disk is full."""

    async def recover(self) -> None:
        """Queue what a server before this one left unfinished."""
        for job in await self._registry.unfinished_jobs():
            logger.info("job %s (%s of %s/%s) goes on after a restart", job.job_id, job.kind, job.project, job.name)
            self._enqueue(job, recovered=True)

    async def known(self, job_id: str, fingerprint: int) -> JobStatus | None:
        """The status of a job that was submitted before, `None` for a new one.

        Raises:
            ConflictError: the id is taken by a job with other content.
        """
        return await self._registry.known_job(job_id, fingerprint)

    async def submit(self, job: Job, fingerprint: int) -> JobStatus:
        """Store and queue a job; a known id returns its status and does nothing else.

        Raises:
            ConflictError: the id is taken by a job with other content.
        """
        status = await self._registry.add_job(job, fingerprint)
        if status.state == "queued" and job.job_id not in self._unfinished:
            self._enqueue(job)
        return status

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        """Status of the job once it has ended, or after `timeout_s`.

        Raises:
            NotFoundError: no such job.
        """
        job = self._unfinished.get(job_id)
        if job is not None and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await job.ended.wait()
            except TimeoutError:
                pass  # the caller asks again
        return self._unrecorded.get(job_id) or await self._registry.job_status(job_id)

    async def idle(self, project: str, name: str, *, recovered_only: bool = False) -> None:
        """Wait until the jobs that are now queued or running for this model have ended."""
        for job in list(self._unfinished.values()):
            if job.model == (project, name) and (job.recovered or not recovered_only):
                logger.info("waiting for a training job of %s/%s", project, name)
                async with waiting(f"a training job of {project}/{name} to end", IDLE_TIMEOUT_S):
                    await job.ended.wait()

    def describe(self) -> list[str]:
        """Unfinished jobs, in the order they came; the first of each base model runs."""
        now = time.monotonic()
        return [
            f"{job_id} of {'/'.join(job.model)}, for {now - job.since:.0f} s"
            + (", begun before this server" if job.recovered else "")
            for job_id, job in self._unfinished.items()
        ]

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    def _enqueue(self, job: Job, *, recovered: bool = False) -> None:
        self._unfinished[job.job_id] = _Unfinished((job.project, job.name), recovered)
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
                self._unfinished.pop(job.job_id).ended.set()

    async def _fail(self, job: Job, error: Exception) -> None:
        status = JobStatus(
            job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="failed",
            error=WireError(**error_body(error)),
        )  # fmt: skip
        try:
            await self._registry.fail_job(status)
        except ArtError:
            logger.exception("the failure of job %s cannot be recorded yet", job.job_id)
            self._unrecorded[job.job_id] = status
            self._workers.append(asyncio.create_task(self._record_later(status), name=f"record-{job.job_id}"))

    async def _record_later(self, status: JobStatus) -> None:
        """The caller knows of the failure already. Until it is recorded a restarted server would run the job again."""
        while status.job_id in self._unrecorded:
            await asyncio.sleep(RECORD_AGAIN_S)
            with contextlib.suppress(ArtError):  # logged when it first happened
                await self._registry.fail_job(status)
                del self._unrecorded[status.job_id]

    async def _run(self, job: Job) -> None:
        started = time.perf_counter()
        model, host = self._find(job.project, job.name)
        from_step = job.from_step if job.from_step is not None else model.step
        if from_step != model.step:
            raise TrainingError(
                f"job {job.job_id} began at step {from_step} of {model.key}, which is at step {model.step} now. Submit "
                "its groups again under a new id"
            )
        await self._registry.begin_job(job, from_step)
        paths = self._data_dir.model(job.project, job.name)
        source, target = paths.checkpoint(from_step), paths.checkpoint(from_step + 1)
        await asyncio.to_thread(_make_way, target, job.job_id)
        result = await host.train(
            job.kind, **job.payload["call"], from_checkpoint=str(source), to_checkpoint=str(target), job_id=job.job_id,
        )  # fmt: skip
        step = from_step + 1
        ledger = job.payload["ledger"]
        accounts = close_ledger(ledger, result["metrics"]) if ledger is not None else {}
        published = await host.load(model.adapter_id(step), target)
        metrics = result["metrics"] | job.payload["metrics"] | accounts | published
        metrics["time/step_job_s"] = time.perf_counter() - started
        before = (await asyncio.to_thread(checkpoints.read_state, source)).metrics
        found = find_findings(metrics, before, highs=_own_bounds(job))
        metrics |= {f"findings/{finding.rule.name}": 1.0 for finding in found}
        findings = [*job.payload["findings"], *map(str, found)]
        for text in findings:
            logger.info("%s step %d: %s", model.key, step, text)
        status = JobStatus(
            job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="succeeded", step=step,
            metrics=metrics, findings=findings, checkpoint_path=str(target),
        )  # fmt: skip
        await self._registry.finish_job(status)
        self._on_published(model, step)


def _own_bounds(job: Job) -> dict[str, float]:
    """Upper bounds of metrics that the job's own settings put in place of those of the rules."""
    gate = job.payload["call"]["config"].get("mismatch")
    return {} if gate is None else {"offpolicy/mismatch_masked_share": gate["alarm"]}


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
