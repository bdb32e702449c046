"""`ServiceTraining`: the training steps of one model, each sent once, followed to its end, and found again.

    make_step   wait for an earlier step of the model -> write down what is sent -> send it -> follow it
    killed      after sending: `settle`, which registration calls, follows the job to its end
    lost        the answer to the sending: the service cannot say which jobs it has, so a checkpoint newer than the
                one that the step began from tells that it took the job. The step is never sent a second time

Steps of one model run one after the other, those of other processes with the same folder too. Otherwise nothing could
tell whose checkpoint a new one is.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from art.backends.serverless.sent_jobs import SentJob, SentJobs
from art.backends.serverless.service import Patience, Service
from art.backends.serverless.wire import Checkpoint, CreateRlJob, CreateSftJob, JobEvent, ServiceModel, finite_numbers
from art.client.http import LostAnswerError
from art.client.jobs import JobView, describe_job
from art.client.training.models import TrainResult
from art.client.training.steps import ModelSteps
from art.client.training.train_job import TrainJob
from art.client.waiting import announce_wait
from art.config.training import OnNothing
from art.errors import ArtError, ConfigError, ConflictError, NotFoundError, ProcessError, error_from_code
from art.protocol.job_states import JobKind
from art.protocol.training import JobProgress, JobStatus, WireError
from art.trajectory import finite_number

logger = logging.getLogger(__name__)

_METRICS = {
    "policy_loss": "loss/train",
    "loss": "loss/train",
    "entropy": "loss/entropy",
    "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate",
    "num_groups_submitted": "data/step_num_groups_submitted",
    "num_groups_trainable": "data/step_num_groups_trainable",
    "num_trajectories": "data/step_num_trajectories",
    "num_trainable_tokens": "data/step_trainer_tokens",
    "train_tokens": "data/step_trainer_tokens",
}
"""ART's names of metrics that the service names otherwise. Others keep their names."""


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
        self, service: Service, model: ServiceModel, sent: SentJobs, steps: ModelSteps, patience: Patience
    ) -> None:
        """
        Args:
            sent: what was sent, on disk.
            steps: takes note of each step.
        """
        self.model = model
        self.sent = sent
        self._service, self._steps, self._patience = service, steps, patience
        self._name = f"{model.project}/{model.name}"
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 for a model that was never trained."""
        checkpoint = await self._service.newest_checkpoint(self.model.id)
        return 0 if checkpoint is None else checkpoint.step

    async def settle(self) -> int:
        """Follow the jobs of an earlier run, or of a call that was cancelled, to their end. Returns the newest step."""
        async with self._turn():
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
        turn = self._turn()
        await turn.acquire()
        try:
            job = self.sent.find(job_id, self.model.id)
            if job is not None and job.digest != work.digest:
                raise ConflictError(
                    f"job {job_id} was sent before with other groups or settings; give this step a `job_id` of its own"
                )
            await self._settle(but=job_id)
            while job is None:
                job = await self._send(work, job_id)
        except BaseException:
            turn.release()
            raise
        result = self._finish(job, turn, verbose=verbose, on_nothing=on_nothing)
        return await result if wait else TrainJob(self, job_id, result)

    async def find(self, job_id: str) -> TrainJob:
        """Return a job that was sent before.

        Raises:
            NotFoundError: no such job of this model was sent from here.
        """
        self._find(job_id)
        turn = self._turn()
        await turn.acquire()
        try:
            job = self._find(job_id)  # a call that had the turn before may have seen its end
        except BaseException:
            turn.release()
            raise
        return TrainJob(self, job_id, self._finish(job, turn))

    async def job_status(self, job_id: str) -> JobStatus:
        """Return what is known of a job: how it ended, or that it was sent."""
        job = self._find(job_id)
        return job.status or self._status(job, state="running")

    async def cancel_job(self, job_id: str) -> JobStatus:
        raise ConfigError(f"the serverless service cannot cancel a job; {job_id} goes on")

    def _find(self, job_id: str) -> SentJob:
        job = self.sent.find(job_id, self.model.id)
        if job is None:
            raise NotFoundError(f"no job {job_id} of {self._name} was sent from here (see {self.sent.path})")
        return job

    def _turn(self) -> asyncio.Lock:
        """The lock that a step of this event loop holds from its sending to its end."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    async def _settle(self, *, but: str = "") -> None:
        for job in self.sent.unfinished(self.model.id):
            if job.job_id == but:
                continue
            what = f"{describe_job(job.kind, self.model.project, self.model.name)} from step {job.from_step}"
            logger.warning("%s was sent earlier and its end is not known: waiting for it", what)
            with JobView(what) as view, announce_wait(view.describe):
                status = await self._follow(job, view)
            how = f"it made step {status.step}" if status.error is None else f"it failed: {status.error.message}"
            logger.warning("%s has ended: %s", what, how)

    async def _send(self, work: StepWork, job_id: str) -> SentJob | None:
        """Send a step, once, and write down what came of it. `None` if another process has sent one before it, which
        has ended now."""
        step = await self.newest_step()
        job = SentJob(
            job_id=job_id, kind=work.kind, digest=work.digest, model_id=self.model.id, from_step=step,
            sent_at=time.time(), findings=list(work.findings), metrics=work.metrics,
        )  # fmt: skip
        if work.make_request is None:
            return self._end(job, state="succeeded", step=step, trained=False)
        request = await work.make_request(step)
        if not self.sent.begin(job):
            await self._settle(but=job_id)
            return None
        try:
            service_id = await self._service.create_job(request)
        except LostAnswerError as lost:
            logger.warning("%s: looking for its checkpoint, since it must not be sent twice", lost)
            return job
        except ArtError:
            self.sent.remove(job_id)
            raise
        return self.sent.put(job.model_copy(update={"service_job_id": service_id}))

    async def _finish(
        self, job: SentJob, turn: asyncio.Lock, *, verbose: bool = False, on_nothing: OnNothing = "skip"
    ) -> TrainResult:
        """Follow a job to its end and let the next one have its turn."""
        what = describe_job(job.kind, self.model.project, self.model.name)
        try:
            with JobView(what, show=verbose) as view, announce_wait(view.describe):
                status = job.status or await self._follow(job, view)
        finally:
            turn.release()
        if status.error is not None:
            raise error_from_code(status.error.code, status.error.message)
        return self._steps.conclude(self._name, status, on_nothing)

    async def _follow(self, job: SentJob, view: JobView) -> JobStatus:
        """Wait for the end of a job, and write it down.

        Raises:
            ProcessError: the service does not answer, or the job does not end. It may still end later.
        """
        if job.service_job_id is None:
            job = await self._find_by_step(job)
        if job.status is None and job.service_job_id is not None:
            try:
                job = await self._read_events(job, job.service_job_id, view)
            except NotFoundError as error:
                job = self._end(job, state="failed", error=WireError(code=error.code, message=error.message))
        assert job.status is not None
        return job.status

    async def _read_events(self, job: SentJob, service_id: str, view: JobView) -> SentJob:
        deadline = time.monotonic() + self._patience.job_s
        stuck_since: float | None = None
        seen: set[str] = set()
        updates: list[dict[str, float]] = []
        after, num_updates = None, 0
        while True:
            page = await self._service.events(service_id, after)
            events = [event for event in page.data if event.id not in seen]
            seen.update(event.id for event in events)
            for event in events:
                after = event.id
                if event.type == "training_started":
                    num_updates = int(finite_number(event.data.get("num_sequences")) or 0)
                elif event.type == "gradient_step":
                    updates.append(_numbers(event))
                    done = JobProgress(phase="train", done=len(updates), total=max(num_updates, len(updates)))
                    view.update(self._status(job, state="running", progress=done))
                elif event.type == "training_failed":
                    why = str(event.data.get("error_message") or "the service gave no reason")
                    return self._end(job, state="failed", error=WireError(code="training_failed", message=why))
                elif event.type == "training_ended":
                    return await self._succeed(job, updates)
            if page.has_more and events:
                stuck_since = None
                continue
            stuck_since = (stuck_since or time.monotonic()) if page.has_more else None
            if stuck_since is not None and time.monotonic() - stuck_since > self._patience.answer_s:
                raise ProcessError(
                    f"{view.describe()}: the service says that its job {service_id} has more events, but for "
                    f"{self._patience.answer_s:g} s it has given none after {after}. Its call for the events after "
                    "another one does not work, so the job's end cannot be seen; look for it in W&B"
                )
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{view.describe()}: the service's job {service_id} has not ended within {self._patience.job_s:g}"
                    f" s. It goes on there; `await backend.follow_train_job(model, {job.job_id!r})` waits for it again"
                )
            await asyncio.sleep(self._patience.poll_s)

    async def _succeed(self, job: SentJob, updates: list[dict[str, float]]) -> SentJob:
        """Wait for the checkpoint of a job that has ended, and write down its result."""
        metrics = _means(updates) | {"data/step_num_gradient_steps": float(len(updates))}
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
        """Find a job of which only the sending is known, by the checkpoint that it makes, or by what the process that
        sends it writes down meanwhile. Returns it with its end, or with the service's name of it."""
        while True:
            known = self.sent.find(job.job_id, job.model_id)
            if known is None:
                why = "another process has sent this job; the service refused it, or the model was deleted"
                return self._with_end(job, state="failed", error=WireError(code=ProcessError.code, message=why))
            if known.status is not None or known.service_job_id is not None:
                return known
            is_last = time.time() > job.sent_at + self._patience.lost_job_s
            checkpoint = await self._checkpoint_after(job.from_step, until=0.0)
            if checkpoint is not None or is_last:
                break
            await asyncio.sleep(self._patience.poll_s)
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

    async def _checkpoint_after(self, step: int, *, until: float) -> Checkpoint | None:
        """Wait for a checkpoint with a larger step, until a Unix time; `None` if there is none by then."""
        while True:
            newest = await self._service.newest_checkpoint(self.model.id)
            if newest is not None and newest.step > step:
                return newest
            if time.time() > until:
                return None
            await asyncio.sleep(self._patience.poll_s)

    def _end(self, job: SentJob, *, metrics: dict[str, float] | None = None, **end: Any) -> SentJob:
        """Write down how a job ended."""
        return self.sent.put(self._with_end(job, metrics=metrics, **end))

    def _with_end(self, job: SentJob, *, metrics: dict[str, float] | None = None, **end: Any) -> SentJob:
        now = time.time()
        spent = {"time/step_trainer_s": max(0.0, now - job.sent_at)} if end.get("trained") else {}
        numbers = job.metrics | spent | (metrics or {})
        status = self._status(job, metrics=numbers, findings=job.findings, ended_at=now, **end)
        return job.model_copy(update={"status": status})

    def _status(self, job: SentJob, **more: Any) -> JobStatus:
        return JobStatus(
            job_id=job.job_id, kind=job.kind, project=self.model.project, name=self.model.name,
            created_at=job.sent_at, **more,
        )  # fmt: skip


def _numbers(event: JobEvent) -> dict[str, float]:
    """The metrics of an update, which the service gives as the data of the event or as a part of it."""
    data = event.data.get("metrics", event.data)
    return {_METRICS.get(name, name): number for name, number in finite_numbers(data).items()}


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: statistics.fmean(update[name] for update in updates if name in update) for name in names}
