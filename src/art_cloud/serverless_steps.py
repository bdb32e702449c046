"""`ServiceTraining`: the training steps of one model, each sent once, followed to its end, and found again.

    make_step   take the turn of the model -> write down what is sent -> send it -> follow it -> give the turn back
    killed      after sending: `settle`, which registration calls, follows the job to its end
    lost        the answer to the sending: the service cannot say which jobs it has, so a checkpoint newer than the
                one that the step began from tells that it took the job. The step is never sent a second time

Steps of one model run one after the other, those of other processes with the same folder too: the turn is a lock on a
file, which the kernel gives back when a process dies. Otherwise nothing could tell whose checkpoint a new one is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, ValidationError

from art.client.http import LostAnswerError
from art.client.terminal import JobView, announce_wait, describe_job
from art.client.training import ModelSteps, TrainJob, TrainResult
from art.config.training import OnNothing
from art.errors import ArtError, ConfigError, ConflictError, NotFoundError, ProcessError, StorageError, error_from_code
from art.protocol.training import JobKind, JobProgress, JobStatus, WireError
from art.storage.atomic import storage_errors, write_file
from art.storage.lock import take_lock
from art.trajectory import finite_number
from art_cloud.serverless_service import (
    CreateRlJob,
    CreateSftJob,
    Patience,
    Service,
    ServiceCheckpoint,
    ServiceModel,
    finite_numbers,
)

logger = logging.getLogger(__name__)

KEPT = 100
"""Newest jobs that are kept on disk. Older ones that have ended are forgotten."""
_METRICS = {
    "policy_loss": "loss/train", "loss": "loss/train", "entropy": "loss/entropy", "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate", "num_groups_submitted": "data/step_num_groups_submitted",
    "num_groups_trainable": "data/step_num_groups_trainable", "num_trajectories": "data/step_num_trajectories",
    "num_trainable_tokens": "data/step_trainer_tokens", "train_tokens": "data/step_trainer_tokens",
}  # fmt: skip
"""ART's names of metrics that the service names otherwise. Others keep their names."""


class SentJob(BaseModel):
    """A job that was sent, or was about to be sent when the script was killed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    job_id: str
    """ART's name of the job."""
    kind: JobKind
    digest: str
    """Hash of groups and settings, by which another request under the same name is noticed."""
    model_id: str
    """Model at the service. Jobs of an earlier model of the same name, which was deleted, do not count."""
    from_step: int
    """Newest checkpoint when the job was sent. The job's own has a larger step."""
    sent_at: float
    """Unix time at which it was sent."""
    service_job_id: str | None = None
    """The service's name of the job; `None` until it has answered."""
    findings: list[str] = []
    """Remarks about what was sent."""
    metrics: dict[str, float] = {}
    """Numbers about what was sent."""
    status: JobStatus | None = None
    """How the job ended; `None` until that is known."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    jobs: list[SentJob] = []


class SentJobs:
    """The jobs of one model on disk. Only who has the turn of the model changes them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[SentJob]:
        """Return the jobs in the order in which they were sent.

        Raises:
            StorageError: the file is damaged. It is not replaced, because a job may be running that it names.
        """
        try:
            with storage_errors(self.path, "reading"):
                content = self.path.read_bytes() if self.path.exists() else b"{}"
            return _File.model_validate_json(content).jobs
        except ValidationError as error:
            raise StorageError(
                f"{self.path} cannot be read: {error}. It names the jobs that were sent to the service; see there "
                "whether one is running, then remove the file"
            ) from error

    def put(self, job: SentJob) -> SentJob:
        """Write a job, in place of what was known about it. It is on disk before the call returns."""
        jobs = {known.job_id: known for known in self.read()} | {job.job_id: job}
        old = list(jobs)[:-KEPT]
        self._write([one for one in jobs.values() if one.job_id not in old or one.status is None])
        return job

    def remove(self, job_id: str) -> None:
        """Forget a job that the service has refused."""
        self._write([job for job in self.read() if job.job_id != job_id])

    def _write(self, jobs: list[SentJob]) -> None:
        write_file(self.path, _File(jobs=jobs).model_dump_json(indent=1).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step that was checked and can be sent."""

    kind: JobKind
    digest: str
    """Hash of groups and settings."""
    findings: Sequence[str] = ()
    """Remarks about what is sent, or why nothing is."""
    metrics: dict[str, float]
    """Numbers about what is sent."""
    make_request: Callable[[int], Awaitable[CreateRlJob | CreateSftJob]] | None
    """Makes the request for the step that starts from a checkpoint; `None` if there is nothing to learn."""


class ServiceTraining:
    """Sends and follows the training steps of one registered model."""

    def __init__(
        self, service: Service, model: ServiceModel, path: Path, steps: ModelSteps, patience: Patience
    ) -> None:
        """
        Args:
            path: file in which the jobs that were sent are written down.
            steps: takes note of each step.
        """
        self.model = model
        self.sent = SentJobs(path)
        self._service, self._steps, self._patience = service, steps, patience
        self._name = f"{model.project}/{model.name}"
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 for a model that was never trained."""
        checkpoint = await self._service.newest_checkpoint(self.model.id)
        return 0 if checkpoint is None else checkpoint.step

    async def settle(self) -> int:
        """Follow the jobs of an earlier run, or of a call that was cancelled, to their end. Returns the newest step."""
        with await self._turn():
            await self._settle()
        return await self.newest_step()

    async def make_step(
        self, work: StepWork, job_id: str, *, verbose: bool, wait: bool, on_nothing: OnNothing
    ) -> TrainResult | TrainJob:
        """Send a step. Return its result, or with `wait=False` a job as soon as the service has it.

        Raises:
            ConflictError: `job_id` is the name of a job with other groups or settings.
            ProcessError: the service does not answer, or an earlier step of the model does not end.
        """
        with await self._turn() as turn:
            job = self._find(job_id)
            if job is not None and job.digest != work.digest:
                raise ConflictError(
                    f"job {job_id} was sent before with other groups or settings; give this step a `job_id` of its own"
                )
            await self._settle(but=job_id)
            job = job or await self._send(work, job_id)
            running = self._finish(job, turn.pop_all(), verbose=verbose, on_nothing=on_nothing)
        return await running if wait else TrainJob(self, job_id, running)

    async def find(self, job_id: str) -> TrainJob:
        """Return a job that was sent before.

        Raises:
            NotFoundError: no such job of this model was sent from here.
        """
        self._known(job_id)
        with await self._turn() as turn:
            job = self._known(job_id)  # a call that had the turn before may have seen its end
            return TrainJob(self, job_id, self._finish(job, turn.pop_all()))

    async def job_status(self, job_id: str) -> JobStatus:
        """Return what is known of a job: how it ended, or that it was sent."""
        job = self._known(job_id)
        return job.status or self._status(job, state="running")

    async def cancel_job(self, job_id: str) -> JobStatus:
        raise ConfigError(f"the serverless service cannot cancel a job; {job_id} goes on")

    def _find(self, job_id: str) -> SentJob | None:
        jobs = self.sent.read()
        return next((job for job in jobs if (job.job_id, job.model_id) == (job_id, self.model.id)), None)

    def _known(self, job_id: str) -> SentJob:
        if (job := self._find(job_id)) is None:
            raise NotFoundError(f"no job {job_id} of {self._name} was sent from here (see {self.sent.path})")
        return job

    async def _turn(self) -> contextlib.ExitStack:
        """Wait until no other step of the model is under way, here or in another process with the same folder.

        The turn ends when the stack is closed.
        """
        lock = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        await lock.acquire()
        with contextlib.ExitStack() as turn:
            turn.callback(lock.release)
            with announce_wait(f"another program's step of {self._name}"):
                while (file := take_lock(self.sent.path.with_name(f".{self.sent.path.name}.lock"))) is None:
                    await asyncio.sleep(self._patience.poll_s)
            turn.callback(os.close, file)
            return turn.pop_all()

    async def _settle(self, *, but: str = "") -> None:
        for job in self.sent.read():
            if job.status is not None or job.model_id != self.model.id or job.job_id == but:
                continue
            what = f"{describe_job(job.kind, self.model.project, self.model.name)} from step {job.from_step}"
            logger.warning("%s was sent earlier and its end is not known: waiting for it", what)
            with JobView(what) as view, announce_wait(view.describe):
                status = await self._follow(job, view)
            how = f"it made step {status.step}" if status.error is None else f"it failed: {status.error.message}"
            logger.warning("%s has ended: %s", what, how)

    async def _send(self, work: StepWork, job_id: str) -> SentJob:
        """Send a step, once, and write down what came of it."""
        step = await self.newest_step()
        job = SentJob(
            job_id=job_id, kind=work.kind, digest=work.digest, model_id=self.model.id, from_step=step,
            sent_at=time.time(), findings=list(work.findings), metrics=work.metrics,
        )  # fmt: skip
        if work.make_request is None:
            return self._end(job, state="succeeded", step=step, trained=False)
        request = await work.make_request(step)
        self.sent.put(job)
        try:
            service_id = await self._service.create_job(request)
        except LostAnswerError as lost:
            logger.warning("%s: looking for its checkpoint, since it must not be sent twice", lost)
            return job
        except ArtError:
            self.sent.remove(job_id)
            raise
        return self.sent.put(job.model_copy(update={"service_job_id": service_id}))

    def _finish(
        self, job: SentJob, turn: contextlib.ExitStack, *, verbose: bool = False, on_nothing: OnNothing = "skip"
    ) -> asyncio.Task[TrainResult]:
        """Follow a job to its end and let the next one have its turn, in a task."""

        async def finish() -> TrainResult:
            what = describe_job(job.kind, self.model.project, self.model.name)
            with JobView(what, show=verbose) as view, announce_wait(view.describe):
                status = job.status or await self._follow(job, view)
            if status.error is not None:
                raise error_from_code(status.error.code, status.error.message)
            return self._steps.conclude(self._name, status, on_nothing)

        task = asyncio.create_task(finish())
        task.add_done_callback(lambda _: turn.close())  # also if it is cancelled before it begins
        return task

    async def _follow(self, job: SentJob, view: JobView) -> JobStatus:
        """Wait for the end of a job, and write it down.

        Raises:
            ProcessError: the service does not answer, or the job does not end. It may still end later.
        """
        try:
            ended = await (
                self._find_by_step(job)
                if job.service_job_id is None
                else self._read_events(job, job.service_job_id, view)
            )
        except NotFoundError as error:
            ended = self._end(job, state="failed", error=WireError(code=error.code, message=error.message))
        assert ended.status is not None
        return ended.status

    async def _read_events(self, job: SentJob, service_id: str, view: JobView) -> SentJob:
        deadline = time.monotonic() + self._patience.job_s
        updates: list[dict[str, float]] = []
        after, num_updates = None, 0
        while True:
            page = await self._service.events(service_id, after)
            for event in page.data:
                after = event.id
                if event.type == "training_started":
                    num_updates = int(finite_number(event.data.get("num_sequences")) or 0)
                elif event.type == "gradient_step":
                    measured = finite_numbers(event.data.get("metrics", event.data))  # as a part of it, or all of it
                    updates.append({_METRICS.get(name, name): number for name, number in measured.items()})
                    done = JobProgress(phase="train", done=len(updates), total=max(num_updates, len(updates)))
                    view.update(self._status(job, state="running", progress=done))
                elif event.type == "training_failed":
                    why = str(event.data.get("error_message") or "the service gave no reason")
                    return self._end(job, state="failed", error=WireError(code="training_failed", message=why))
                elif event.type == "training_ended":
                    return await self._succeed(job, updates)
            if page.has_more and page.data:
                continue
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{view.describe()}: the service's job {service_id} has not ended within {self._patience.job_s:g}"
                    f" s. It goes on there; `await backend.follow_train_job(model, {job.job_id!r})` waits for it again"
                )
            await asyncio.sleep(self._patience.poll_s)

    async def _succeed(self, job: SentJob, updates: list[dict[str, float]]) -> SentJob:
        """Wait for the checkpoint of a job that has ended, and write down its result."""
        metrics = {"data/step_num_gradient_steps": float(len(updates))}
        for name in dict.fromkeys(name for update in updates for name in update):
            metrics[name] = statistics.fmean(update[name] for update in updates if name in update)
        checkpoint = await self._checkpoint_after(job.from_step, until=time.time() + self._patience.checkpoint_s)
        if checkpoint is not None:
            return self._end(job, state="succeeded", step=checkpoint.step, trained=True, metrics=metrics)
        if updates:
            raise ProcessError(
                f"training of {self._name} ended with {len(updates)} updates, but the service lists no checkpoint "
                f"after step {job.from_step} within {self._patience.checkpoint_s:.0f} s"
            )
        nothing = ["the service made no update from these groups: it found nothing to learn"]
        job = job.model_copy(update={"findings": [*nothing, *job.findings]})
        return self._end(job, state="succeeded", step=job.from_step, trained=False, metrics=metrics)

    async def _find_by_step(self, job: SentJob) -> SentJob:
        """Find a job of which only the sending is known, by the checkpoint that it makes. Returns it with its end."""
        checkpoint = await self._checkpoint_after(job.from_step, until=job.sent_at + self._patience.lost_job_s)
        if checkpoint is None:
            why = (
                f"the answer to the submission was lost, and no checkpoint after step {job.from_step} was listed within"
                f" {self._patience.lost_job_s:.0f} s, so the service has probably not taken it. It was not sent again, "
                "because that could train it twice; call `train` again to send a new job"
            )
            return self._end(job, state="failed", error=WireError(code=ProcessError.code, message=why))
        remark = ["the answer to the submission was lost: the job was found by its checkpoint"]
        job = job.model_copy(update={"findings": [*job.findings, *remark]})
        return self._end(job, state="succeeded", step=checkpoint.step, trained=True, metrics=checkpoint.metrics)

    async def _checkpoint_after(self, step: int, *, until: float) -> ServiceCheckpoint | None:
        """Wait for a checkpoint with a larger step, until a Unix time; `None` if there is none by then."""
        while True:
            is_last = time.time() > until
            newest = await self._service.newest_checkpoint(self.model.id)
            if newest is not None and newest.step > step:
                return newest
            if is_last:
                return None
            await asyncio.sleep(self._patience.poll_s)

    def _end(self, job: SentJob, *, metrics: dict[str, float] | None = None, **end: Any) -> SentJob:
        """Write down how a job ended."""
        now = time.time()
        spent = {"time/step_trainer_s": max(0.0, now - job.sent_at)} if end.get("trained") else {}
        numbers = job.metrics | spent | (metrics or {})
        status = self._status(job, metrics=numbers, findings=job.findings, ended_at=now, **end)
        return self.sent.put(job.model_copy(update={"status": status}))

    def _status(self, job: SentJob, **more: Any) -> JobStatus:
        return JobStatus(
            job_id=job.job_id, kind=job.kind, project=self.model.project, name=self.model.name,
            created_at=job.sent_at, **more,
        )  # fmt: skip
