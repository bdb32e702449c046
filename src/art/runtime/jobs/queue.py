"""The queue of a server's jobs: it runs them lane by lane, and tells their clients how they go on.

    submit --> JobStore (durable) --> lane: a fair queue, one job at a time --> JobWork.run --> ended; waiters are told

All jobs that train a base model, or move one of its models to another step, share a lane: they need the same trainer,
and the step that they start from must not change while they run. Everything else about a job is in its `JobWork`. A job
that a crash interrupted runs again.

In a lane projects take turns, and within a project jobs run in the order in which they came. The project whose last
turn is longest ago goes next; one that never had a turn goes before all others. So a project with a hundred queued
steps delays another project by at most one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from art.errors import ArtError, ConflictError, JobCancelledError
from art.protocol.live import FindingMade, JobActivity, JobMoved, LiveData, StepEnded
from art.protocol.rpc import error_body
from art.protocol.training import JobKind, JobProgress, JobState, JobStatus, WireError
from art.runtime.jobs.job import Entry, Job, JobControl, JobStore, JobWork, Payload
from art.worker.waits import waiting

logger = logging.getLogger(__name__)

RECORD_AGAIN_S = 5.0
"""Time between attempts to record the end of a job."""
IDLE_TIMEOUT_S = 24 * 3600.0
"""Longest wait for the jobs of a model to end. Clients wait as long for a single job."""
PROGRESS_EVERY_S = 1.0
"""Shortest time between two progress events within a phase."""


class FairQueue:
    """The queue of one lane, of job ids. The projects that they belong to take turns."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        """Set when a job is put into the queue."""
        self._last_turn: dict[str, int] = {}
        self._next_turn = 1
        self._waiting: dict[str, deque[str]] = {}
        """The waiting jobs of each project that has some, in the order in which they came."""

    def put(self, project: str, job_id: str) -> None:
        self._waiting.setdefault(project, deque()).append(job_id)
        self.arrived.set()

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


SHOWN_METRICS = (
    "data/reward_mean", "loss/entropy", "loss/kl_to_sampler", "loss/grad_norm", "data/step_num_rollouts_trained",
    "ledger/sampled_tokens", "ledger/trained_tokens", "throughput/train_tokens_per_s", "time/step_trainer_s",
    "time/publish_s", "time/step_job_s",
)  # fmt: skip
"""Metrics of a step that the live view shows."""


def job_moved(
    entry: Entry, state: JobState, *, progress: JobProgress | None = None, error: WireError | None = None
) -> JobMoved:
    """Tell that a job changed its state or made progress."""
    done = {} if progress is None else {"phase": progress.phase, "done": progress.done, "total": progress.total}
    return JobMoved(
        job_id=entry.job_id, job_kind=entry.kind, project=entry.project, name=entry.name, state=state,
        error=None if error is None else error.message.partition("\n")[0], **done,
    )  # fmt: skip


def news_of_end(status: JobStatus) -> Iterator[LiveData]:
    """Tell what a training job that succeeded has measured and found."""
    if status.kind not in ("train", "train_sft") or status.step is None:
        return
    shown = {name: status.metrics[name] for name in SHOWN_METRICS if name in status.metrics}
    yield StepEnded(
        project=status.project, name=status.name, step=status.step, trained=bool(status.trained), metrics=shown
    )
    for text in status.findings:
        yield FindingMade(project=status.project, name=status.name, step=status.step, text=text)


class _ActiveJob(JobControl):
    """An unfinished job. `recovered` says that an earlier server took it."""

    def __init__(self, entry: Entry, tell: Callable[[str, LiveData], None], *, recovered: bool) -> None:
        super().__init__()
        self.entry = entry
        self.recovered = recovered
        self._tell = tell
        self.begun = False
        """Whether its work runs or is about to."""
        self.since = time.monotonic()
        """When it came; once it has begun, when it began."""
        self.reached: JobProgress | None = None
        self._told_at = 0.0
        self.ended = asyncio.Event()

    async def progress(self, phase: str, done: int, total: int) -> None:
        now, before = time.monotonic(), self.reached
        self.reached = JobProgress(phase=phase, done=done, total=total)
        if before is None or before.phase != phase or now - self._told_at >= PROGRESS_EVERY_S or done == total:
            self._told_at = now
            self._tell(self.entry.project, job_moved(self.entry, "running", progress=self.reached))


class JobQueue:
    """Queues jobs, runs them lane by lane, and tells their clients how they go on."""

    def __init__(
        self,
        store: JobStore,
        works: Mapping[JobKind, JobWork],
        on_published: Callable[[str, int], None],
        tell: Callable[[str, LiveData], None] = lambda project, news: None,
    ) -> None:
        """`on_published` is called with `project/name` and the new step of a model, once the job is recorded, and
        `tell` with what jobs tell people who watch, and the project that it is about."""
        self.store = store
        self._works = works
        self._on_published = on_published
        self._tell = tell
        self.trained: Counter[str] = Counter()
        """Trained tokens by `project/name`, since the server began."""
        self._lanes: dict[str, FairQueue] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._active: dict[str, _ActiveJob] = {}
        self._unrecorded: dict[str, JobStatus] = {}
        """Ends of jobs that could not be recorded, e.g. because the disk is full."""

    async def recover(self) -> None:
        """Queue the jobs that an earlier server left unfinished."""
        for entry in await self.store.recover():
            logger.info("job %s goes on after a restart", entry)
            self._enqueue(entry, recovered=True)

    async def known(self, job_id: str, fingerprint: str) -> JobStatus | None:
        """The status of a job that was submitted before; `None` for a new one. Raises `ConflictError` if the id belongs
        to a job with another request."""
        status = await self.store.known(job_id, fingerprint)
        return None if status is None else self._with_now(status)

    async def submit(
        self, job_id: str, kind: JobKind, model: tuple[str, str], payload: Payload, fingerprint: str
    ) -> JobStatus:
        """Store and queue a job of `model` (project and name); return its status. If the id is
        known, only the status is returned. Raises what `JobStore.add` raises."""
        entry = Entry(job_id, kind, *model, lane="")
        entry = replace(entry, lane=self._works[kind].lane(entry))
        status = await self.store.add(Job(job_id, kind, *model, entry.lane, payload), fingerprint)
        if status.state == "queued" and job_id not in self._active:
            self._enqueue(entry)
        return self._with_now(status)

    def counts(self) -> Counter[str]:
        """The numbers of running and of queued jobs."""
        return Counter("running" if active.begun else "queued" for active in self._active.values())

    def num_steps_left(self, project: str) -> int:
        """The number of queued and running training steps of a project."""
        entries = [active.entry for active in self._active.values()]
        return sum(entry.project == project and entry.kind in ("train", "train_sft") for entry in entries)

    async def status(self, job_id: str) -> JobStatus:
        """Return the status of a job, with its place in the queue and its newest progress. Raises `NotFoundError` if
        there is no such job."""
        return self._with_now(await self.store.status(job_id))

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        """Wait until a job has ended, for at most `timeout_s`, and return its status. Raises `NotFoundError` if there
        is no such job."""
        active = self._active.get(job_id)
        if active is not None and timeout_s > 0:
            with contextlib.suppress(TimeoutError):  # the caller asks again
                async with asyncio.timeout(timeout_s):
                    await active.ended.wait()
        return await self.status(job_id)

    async def find(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List the statuses of jobs, newest first; by default those of all projects and models."""
        jobs = await self.store.find(project=project, name=name, unfinished=unfinished, limit=limit)
        return list(map(self._with_now, jobs))

    async def cancel(self, job_id: str) -> JobStatus:
        """Stop a job: a queued one at once, a running one as soon as its work can stop. An ended job stays as it is.
        Raises `NotFoundError` if there is no such job."""
        active = self._active.get(job_id)
        if active is not None:
            if self._lanes[active.entry.lane].remove(job_id):
                await self.store.move(job_id, "cancelled")
                self._end(job_id)
            elif not active.begun:
                active.stop.set()
            else:
                with contextlib.suppress(ConflictError):  # it ended in the meantime, or is being cancelled
                    await self.store.move(job_id, "cancelling")
                    active.stop.set()
        return await self.status(job_id)

    async def idle(self, project: str, name: str, *, recovered_only: bool = False) -> None:
        """Wait until the jobs of a model that are queued or running now have ended; with `recovered_only` those that an
        earlier server took."""
        for job in list(self._active.values()):
            if (job.entry.project, job.entry.name) == (project, name) and (job.recovered or not recovered_only):
                logger.info("waiting for a job (%s) of %s/%s", job.entry.kind, project, name)
                async with waiting(f"a job ({job.entry.kind}) of {project}/{name} to end", IDLE_TIMEOUT_S):
                    await job.ended.wait()

    def activity(self) -> list[tuple[Entry, JobActivity]]:
        """What the unfinished jobs do now, in the order in which they came. May be called from any thread."""
        now, unfinished = time.monotonic(), list(self._active.values())
        running = {(active.entry.lane, active.entry.project): active.entry for active in unfinished if active.begun}
        found = []
        for active in unfinished:
            entry = active.entry
            before = None if active.begun else running.get((entry.lane, entry.project))
            told = JobActivity(
                kind=entry.kind, runs=active.begun, age_s=now - active.since, progress=active.reached,
                queue_place=self._place(active), runs_before=None if before is None else before.model_key,
            )  # fmt: skip
            found.append((entry, told))
        return found

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside --

    def _with_now(self, status: JobStatus) -> JobStatus:
        """Add the place in the queue and the newest progress, which change too often to be stored."""
        active = self._active.get(status.job_id)
        if active is None:
            return self._unrecorded.get(status.job_id, status)
        return status.model_copy(update={"queue_place": self._place(active), "progress": active.reached})

    def _place(self, active: _ActiveJob) -> int | None:
        return None if active.begun else self._lanes[active.entry.lane].places().get(active.entry.job_id)

    def _enqueue(self, entry: Entry, *, recovered: bool = False) -> None:
        self._active[entry.job_id] = _ActiveJob(entry, self._tell, recovered=recovered)
        lane = self._lanes.get(entry.lane)
        if lane is None:
            lane = self._lanes[entry.lane] = FairQueue()
            self._tasks.append(asyncio.create_task(self._work(lane), name=f"jobs-{entry.lane}"))
        lane.put(entry.project, entry.job_id)
        self._tell(entry.project, job_moved(entry, "queued"))

    async def _work(self, lane: FairQueue) -> None:
        """Run the jobs of a lane, one after the other."""
        while True:
            if (job_id := lane.take()) is None:
                lane.arrived.clear()
                await lane.arrived.wait()
                continue
            active = self._active[job_id]
            try:
                await self._run(active)
            except JobCancelledError:
                logger.info("job %s was cancelled", active.entry)
                await self._record(active.entry, "cancelled")
            except Exception as error:
                is_ours = isinstance(error, ArtError)
                logger.error("job %s failed: %s", active.entry, error, exc_info=None if is_ours else error)
                await self._record(active.entry, "failed", WireError(**error_body(error)))
            finally:
                self._end(job_id)

    async def _run(self, active: _ActiveJob) -> None:
        job = await self.store.load(active.entry.job_id)
        work = self._works[job.kind]
        from_step = work.from_step(job)
        active.check()
        active.begun, active.since = True, time.monotonic()
        self._tell(job.project, job_moved(active.entry, "running"))
        await self.store.move(job.job_id, "running", from_step=from_step)
        done = await work.run(job, from_step, active)
        status = await self.store.finish(job.job_id, done)
        self._tell(job.project, job_moved(active.entry, "succeeded"))
        self.trained[job.model_key] += int(status.metrics.get("ledger/trained_tokens", 0))
        for news in news_of_end(status):
            self._tell(job.project, news)
        if done.published_step is not None:
            self._on_published(job.model_key, done.published_step)

    def _end(self, job_id: str) -> None:
        active = self._active.pop(job_id)
        active.ended.set()

    async def _record(self, entry: Entry, state: JobState, error: WireError | None = None) -> None:
        """Record that a job did not succeed: at once, or later until it is recorded."""
        self._tell(entry.project, job_moved(entry, state, error=error))
        try:
            await self.store.move(entry.job_id, state, changes={"error": error})
        except ConflictError:  # it was recorded as succeeded, and a later part failed
            logger.exception("job %s has ended already", entry)
        except ArtError as unrecorded:
            logger.error("the end of job %s cannot be recorded yet: %s", entry, unrecorded)
            status = JobStatus(
                job_id=entry.job_id, kind=entry.kind, project=entry.project, name=entry.name, state=state,
                ended_at=time.time(), error=error,
            )  # fmt: skip
            self._unrecorded[entry.job_id] = status

            async def record_later() -> None:  # until then a restarted server would run the job again
                while entry.job_id in self._unrecorded:
                    await asyncio.sleep(RECORD_AGAIN_S)
                    with contextlib.suppress(ArtError):  # logged when it first happened
                        await self.store.move(entry.job_id, state, changes={"error": error})
                        del self._unrecorded[entry.job_id]

            self._tasks.append(asyncio.create_task(record_later(), name=f"record-{entry.job_id}"))
