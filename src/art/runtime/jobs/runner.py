"""Run the jobs of a server. A job that a crash interrupted runs again.

    submit --> JobStore (durable) --> lane: a fair queue, one job at a time --> Work.run --> ended; waiters are told

All jobs that train a base model, or move one of its models to another step, share a lane: they need the same trainer,
and the step that they start from must not change while they run. Everything else about a job is in its `Work`.

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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from art.errors import ArtError, ConflictError, JobCancelledError
from art.gateway.record.usage_book import UNKNOWN_KEY
from art.protocol.frames.frame_encoding import error_body
from art.protocol.job_states import ENDED, JobKind, JobState
from art.protocol.jobs import JobEvent
from art.protocol.live.activity import JobActivity
from art.protocol.live.events import FindingMade, JobMoved, LiveData, StepEnded
from art.protocol.training import JobProgress, JobStatus, WireError
from art.runtime.jobs.job import Entry, Job, JobControl, Payload, Work
from art.runtime.jobs.store import JobStore
from art.runtime.supervision.waits import waiting

logger = logging.getLogger(__name__)


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


SHOWN_METRICS = (
    "data/reward_mean", "loss/entropy", "loss/kl_to_sampler", "loss/grad_norm", "data/step_num_rollouts_trained",
    "ledger/sampled_tokens", "ledger/trained_tokens", "throughput/train_tokens_per_s", "time/step_trainer_s",
    "time/publish_s", "time/step_job_s",
)  # fmt: skip
"""Metrics of a step that the live view shows."""


def moved(
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


RECORD_AGAIN_S = 5.0
"""Time between attempts to record the end of a job."""
IDLE_TIMEOUT_S = 24 * 3600.0
"""Longest wait for the jobs of a model to end. Clients wait as long for a single job."""
PROGRESS_EVERY_S = 1.0
"""Shortest time between two progress events within a phase; each event is stored."""
FORGET_EVERY_S = 3600.0
HEARTBEAT_S = 10.0
"""Time between two signs of life in an event stream."""


@dataclass(slots=True)
class _ActiveJob:
    """An unfinished job."""

    entry: Entry
    recovered: bool
    """Whether an earlier server took the job."""
    control: JobControl
    begun: bool = False
    """Whether its work runs or is about to."""
    progress: JobProgress | None = None
    reported: float = 0.0
    """When progress was last stored."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each change, and then replaced by a new event."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)
    begun_at: float | None = None

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class _Lane:
    queue: FairQueue
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class JobRunner:
    """Queues jobs, runs them lane by lane, and tells their clients how they go on."""

    def __init__(
        self,
        store: JobStore,
        works: Mapping[JobKind, Work],
        on_published: Callable[[str, int], None],
        tell: Callable[[str, LiveData], None] = lambda project, news: None,
    ) -> None:
        """
        Args:
            on_published: called with `project/name` and the new step of a model, once the job is recorded.
            tell: called with what jobs tell people who watch, and the project that it is about.
        """
        self.store = store
        self._works = works
        self._on_published = on_published
        self._tell = tell
        self.trained: Counter[str] = Counter()
        """Trained tokens by `project/name`, since the server began."""
        self._lanes: dict[str, _Lane] = {}
        self._last_turns: dict[tuple[str, str], float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._live: dict[str, _ActiveJob] = {}
        self._unrecorded: dict[str, JobStatus] = {}
        """Ends of jobs that could not be recorded, e.g. because the disk is full."""

    async def recover(self) -> None:
        """Queue the jobs that an earlier server left unfinished."""
        self._last_turns = await self.store.last_turns()
        for entry in await self.store.recover():
            logger.info("job %s goes on after a restart", entry)
            self._enqueue(entry, recovered=True)

    async def known(self, job_id: str, fingerprint: str) -> JobStatus | None:
        """The status of a job that was submitted before; `None` for a new one.

        Raises:
            ConflictError: the id belongs to a job with another request.
        """
        status = await self.store.known(job_id, fingerprint)
        return None if status is None else self._with_now(status)

    async def submit(
        self,
        job_id: str,
        kind: JobKind,
        model: tuple[str, str],
        payload: Payload,
        fingerprint: str,
        key_id: str = UNKNOWN_KEY,
    ) -> JobStatus:
        """Store and queue a job of `model` (project and name) that a key asked for; return its status. If the id is
        known, only the status is returned. Raises what `JobStore.add` raises."""
        entry = Entry(job_id, kind, *model, lane="")
        entry = replace(entry, lane=self._works[kind].lane(entry))
        status = await self.store.add(Job(job_id, kind, *model, entry.lane, payload, key_id=key_id), fingerprint)
        if status.state == "queued" and job_id not in self._live:
            self._enqueue(entry)
        return self._with_now(status)

    def counts(self) -> Counter[str]:
        """The numbers of running and of queued jobs."""
        return Counter("running" if live.begun else "queued" for live in self._live.values())

    def num_steps_left(self, project: str) -> int:
        """The number of queued and running training steps of a project."""
        kinds = ("train", "train_sft")
        return sum(live.entry.project == project and live.entry.kind in kinds for live in self._live.values())

    async def status(self, job_id: str) -> JobStatus:
        """Return the status of a job, with its place in the queue and its newest progress.

        Raises:
            NotFoundError: there is no such job.
        """
        return self._unrecorded.get(job_id) or self._with_now(await self.store.status(job_id))

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        """Wait until a job has ended, for at most `timeout_s`, and return its status.

        Raises:
            NotFoundError: there is no such job.
        """
        job = self._live.get(job_id)
        if job is not None and timeout_s > 0:
            with contextlib.suppress(TimeoutError):  # the caller asks again
                async with asyncio.timeout(timeout_s):
                    await job.ended.wait()
        return await self.status(job_id)

    async def find(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List the statuses of jobs, newest first; by default those of all projects and models."""
        jobs = await self.store.find(project=project, name=name, unfinished=unfinished, limit=limit)
        return [self._unrecorded.get(job.job_id) or self._with_now(job) for job in jobs]

    async def cancel(self, job_id: str) -> JobStatus:
        """Stop a job: a queued one at once, a running one as soon as its work can stop. An ended job stays as it is.

        Raises:
            NotFoundError: there is no such job.
        """
        live = self._live.get(job_id)
        if live is not None:
            if (lane := self._lanes.get(live.entry.lane)) is not None and lane.queue.remove(job_id):
                await self.store.move(job_id, "cancelled")
                self._end(job_id)
            elif not live.begun:
                live.control.stop.set()
            else:
                with contextlib.suppress(ConflictError):  # it ended in the meantime, or is being cancelled
                    await self.store.move(job_id, "cancelling")
                    live.control.stop.set()
                    live.notify()
        return await self.status(job_id)

    def stop_running(self, reason: ArtError) -> None:
        """Stop all jobs that run now. Each fails with `reason`."""
        for live in self._live.values():
            if live.begun and not live.control.stop.is_set():
                live.control.failure = reason
                live.control.stop.set()

    async def events(self, job_id: str, after: int = 0) -> AsyncGenerator[JobEvent | None, None]:
        """Yield the stored events of a job with a number above `after`, then new ones until it has ended. Changes of
        its place in the queue are events too. `None` is a sign of life, after `HEARTBEAT_S` without an event.

        Raises:
            NotFoundError: there is no such job.
        """
        place = None
        while True:
            live = self._live.get(job_id)
            changed = live.changed if live is not None else None
            for event in await self.store.events(job_id, after):
                after = event.number or after
                if event.state in ENDED:
                    yield event.model_copy(update={"status": await self.status(job_id)})
                    return
                yield event
            if live is None or changed is None:
                status = await self.status(job_id)
                if after == 0 or job_id in self._unrecorded:  # its end was never stored as an event
                    yield JobEvent(kind="state", at=status.ended_at or time.time(), state=status.state, status=status)
                return
            if (now := self._place(live)) != place and now is not None:
                yield JobEvent(kind="queue", at=time.time(), queue_place=now)
            place = now
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def idle(self, project: str, name: str, *, recovered_only: bool = False) -> None:
        """Wait until the jobs of a model that are queued or running now have ended.

        Args:
            recovered_only: wait only for jobs that an earlier server took.
        """
        for job in list(self._live.values()):
            if (job.entry.project, job.entry.name) == (project, name) and (job.recovered or not recovered_only):
                logger.info("waiting for a job (%s) of %s/%s", job.entry.kind, project, name)
                async with waiting(f"a job ({job.entry.kind}) of {project}/{name} to end", IDLE_TIMEOUT_S):
                    await job.ended.wait()

    def activity(self) -> list[tuple[Entry, JobActivity]]:
        """What the unfinished jobs do now, in the order in which they came. May be called from any thread."""
        now, unfinished = time.monotonic(), list(self._live.values())
        runs = {live.entry.lane: live.entry for live in unfinished if live.begun}
        return [(live.entry, self._activity(live, runs.get(live.entry.lane), now)) for live in unfinished]

    def _activity(self, live: _ActiveJob, before: Entry | None, now: float) -> JobActivity:
        is_near = before is not None and not live.begun and before.project == live.entry.project
        return JobActivity(
            kind=live.entry.kind, runs=live.begun, age_s=now - (live.begun_at or live.since), progress=live.progress,
            queue_place=self._place(live), runs_before=before.model_key if before is not None and is_near else None,
        )  # fmt: skip

    def describe(self) -> list[str]:
        """Describe the unfinished jobs, in the order in which they came."""
        now = time.monotonic()
        return [
            f"{job_id} ({live.entry.kind}) of {live.entry.project}/{live.entry.name}, for {now - live.since:.0f} s"
            + (f", place {place} in its queue" if (place := self._place(live)) is not None else ", runs")
            + (", begun before this server" if live.recovered else "")
            for job_id, live in self._live.items()
        ]

    async def forget_regularly(self, age_s: float) -> None:
        """Delete progress events of ended jobs older than `age_s`, now and every `FORGET_EVERY_S`, until cancelled."""
        while True:
            try:
                await self.store.forget_progress(time.time() - age_s)
            except ArtError as error:
                logger.warning("the progress of old jobs could not be deleted, next try in an hour: %s", error)
            await asyncio.sleep(FORGET_EVERY_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _with_now(self, status: JobStatus) -> JobStatus:
        """Add the place in the queue and the newest progress, which change too often to be stored."""
        live = self._live.get(status.job_id)
        if live is None:
            return status
        return status.model_copy(update={"queue_place": self._place(live), "progress": live.progress})

    def _place(self, live: _ActiveJob) -> int | None:
        lane = self._lanes.get(live.entry.lane)
        return None if lane is None or live.begun else lane.queue.places().get(live.entry.job_id)

    def _enqueue(self, entry: Entry, *, recovered: bool = False) -> None:
        live = _ActiveJob(entry, recovered, JobControl(lambda progress: self._report(live, progress)))
        self._live[entry.job_id] = live
        lane_of_job = self._lanes.get(entry.lane)
        if lane_of_job is None:
            turns = {project: at for (lane, project), at in self._last_turns.items() if lane == entry.lane and at}
            lane_of_job = self._lanes[entry.lane] = _Lane(FairQueue(turns))
            self._tasks.append(asyncio.create_task(self._work(lane_of_job), name=f"jobs-{entry.lane}"))
        lane_of_job.queue.put(entry.project, entry.job_id)
        lane_of_job.arrived.set()
        self._tell(entry.project, moved(entry, "queued"))

    async def _report(self, live: _ActiveJob, progress: JobProgress) -> None:
        now, before = time.monotonic(), live.progress
        live.progress = progress
        is_due = now - live.reported >= PROGRESS_EVERY_S or progress.done == progress.total
        if is_due or before is None or before.phase != progress.phase:
            live.reported = now
            self._tell(live.entry.project, moved(live.entry, "running", progress=progress))
            await self.store.add_progress(live.entry.job_id, progress)
            live.notify()

    async def _work(self, lane: _Lane) -> None:
        while True:
            if (job_id := lane.queue.take()) is None:
                lane.arrived.clear()
                await lane.arrived.wait()
                continue
            for waiting_job in lane.queue.places():
                self._live[waiting_job].notify()  # each moved up one place
            live = self._live[job_id]
            try:
                await self._run(live)
            except Exception as raised:
                await self._record_failure(live, raised)
            finally:
                self._end(job_id)

    async def _record_failure(self, live: _ActiveJob, raised: Exception) -> None:
        error: Exception = raised
        if isinstance(raised, JobCancelledError):
            if live.control.failure is None:
                logger.info("job %s was cancelled", live.entry)
                await self._record(live.entry, "cancelled")
                return
            error = live.control.failure
        logger.error("job %s failed: %s", live.entry, error, exc_info=None if isinstance(error, ArtError) else error)
        await self._record(live.entry, "failed", WireError(**error_body(error)))

    async def _run(self, live: _ActiveJob) -> None:
        job = await self.store.load(live.entry.job_id)
        work = self._works[job.kind]
        from_step = work.from_step(job)
        live.control.check()
        live.begun, live.begun_at = True, time.monotonic()
        self._tell(live.entry.project, moved(live.entry, "running"))
        await self.store.move(job.job_id, "running", from_step=from_step)
        live.notify()
        done = await work.run(job, from_step, live.control)
        status = await self.store.finish(job.job_id, done)
        self._tell(job.project, moved(live.entry, "succeeded"))
        self.trained[job.model_key] += int(status.metrics.get("ledger/trained_tokens", 0))
        for news in news_of_end(status):
            self._tell(job.project, news)
        if done.published_step is not None:
            self._on_published(job.model_key, done.published_step)

    def _end(self, job_id: str) -> None:
        live = self._live.pop(job_id)
        live.ended.set()
        live.notify()

    async def _record(self, entry: Entry, state: JobState, error: WireError | None = None) -> None:
        self._tell(entry.project, moved(entry, state, error=error))
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
            self._tasks.append(asyncio.create_task(self._record_later(status), name=f"record-{entry.job_id}"))

    async def _record_later(self, status: JobStatus) -> None:
        """Try until the end of a job is recorded. Until then a restarted server would run the job again."""
        while status.job_id in self._unrecorded:
            await asyncio.sleep(RECORD_AGAIN_S)
            with contextlib.suppress(ArtError):  # logged when it first happened
                await self.store.move(status.job_id, status.state, changes={"error": status.error})
                del self._unrecorded[status.job_id]
