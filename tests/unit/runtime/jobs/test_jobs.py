"""The queue of jobs over a work that does nothing: turns, cancelling, and a server that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from art.config import TrainConfig
from art.credit.plan import StepPlan
from art.errors import ArtError, ConflictError, JobCancelledError, NotFoundError, TrainingError
from art.protocol.training import ENDED, JobStatus
from art.runtime.jobs import queue as jobs
from art.runtime.jobs.job import Done, Entry, Job, JobControl, JobStore, TrainPayload
from art.runtime.jobs.queue import JobQueue
from art.runtime.registry import Registry
from art.storage.database import Database

PAYLOAD = TrainPayload(config=TrainConfig(), plan=StepPlan())


class Steps:
    """A work of two parts, each of which waits for leave."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.leave = asyncio.Event()
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        """Errors of single jobs."""

    def lane(self, job: Entry) -> str:
        return "elsewhere" if job.name == "elsewhere" else "lane"

    def from_step(self, job: Job) -> int:
        return 7 if job.from_step is None else job.from_step

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        assert from_step == 7
        self.order.append(job.job_id)
        for part in (1, 2):
            await control.progress("train", part, 2)
            while not self.leave.is_set() and not control.stop.is_set():
                await asyncio.sleep(0.001)
            control.check()
        if (error := self.errors.get(job.job_id, self.error)) is not None:
            raise error
        return Done({"step": 8, "metrics": {"loss": 0.5}}, published_step=8)


class Server:
    def __init__(self, path: Path) -> None:
        self.database = Database(path / "art.db")
        self.work = Steps()
        self.store = JobStore(self.database)
        self.published: list[tuple[str, int]] = []
        self.heard: list[Any] = []
        """What jobs told those who watch, with the project."""
        self.queue = JobQueue(
            self.store,
            {"train": self.work},
            lambda *model_step: self.published.append(model_step),
            lambda *news: self.heard.append(news),
        )

    async def start(self) -> Server:
        await Registry(self.database).start()
        await self.store.start()
        await self.queue.recover()
        return self

    async def submit(self, job_id: str, project: str = "p", name: str = "m") -> JobStatus:
        return await self.queue.submit(job_id, "train", (project, name), PAYLOAD, "1")

    async def until(self, job_id: str, *states: str) -> JobStatus:
        async with asyncio.timeout(60):
            while (status := await self.queue.status(job_id)).state not in states:
                await asyncio.sleep(0.002)
        return status

    async def close(self) -> None:
        await self.queue.close()
        self.database.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = await Server(tmp_path).start()
    yield server
    await server.close()


async def test_turns_places_and_lanes(server: Server) -> None:
    for job_id, project in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]:
        await server.submit(job_id, project)
    await server.submit("c1", "a", "elsewhere")
    await server.until("a1", "running")
    await server.until("c1", "running")
    assert [(await server.queue.status(job_id)).queue_place for job_id in ("a1", "a2", "a3", "b1")] == [None, 2, 3, 1]
    assert server.queue.counts() == {"running": 2, "queued": 3}
    running = await server.queue.status("a1")
    assert running.progress is not None
    assert (running.progress.phase, running.progress.done) == ("train", 1)
    assert [job.job_id for job in await server.queue.find(project="a", unfinished=True)] == ["c1", "a3", "a2", "a1"]
    entry, job = server.queue.activity()[1]
    assert (str(entry), job.runs, job.queue_place) == ("a2 (train of a/m)", False, 2)
    server.work.leave.set()
    for job_id in ("a1", "a2", "a3", "b1", "c1"):
        assert (await server.queue.wait(job_id, 60)).metrics == {"loss": 0.5}
    assert [job_id for job_id in server.work.order if job_id != "c1"] == ["a1", "b1", "a2", "a3"]
    assert sorted(server.published) == [("a/elsewhere", 8), *[("a/m", 8)] * 3, ("b/m", 8)]


async def test_a_queued_job_is_cancelled_at_once_and_a_running_one_when_its_work_stops(server: Server) -> None:
    for job_id in ("job-1", "job-2", "job-3"):
        await server.submit(job_id)
    await server.until("job-1", "running")
    following = asyncio.ensure_future(server.queue.wait("job-2", 60))
    await asyncio.sleep(0)
    assert (await server.queue.cancel("job-2")).state == "cancelled"
    assert (await following).state == "cancelled"
    assert (await server.queue.cancel("job-1")).state in ("cancelling", "cancelled")
    assert (await server.queue.cancel("job-1")).state in ("cancelling", "cancelled"), "twice is once"
    await server.until("job-1", "cancelled")
    server.work.leave.set()
    assert (await server.queue.wait("job-3", 60)).state == "succeeded"
    assert server.work.order == ["job-1", "job-3"]
    assert (await server.queue.cancel("job-3")).state == "succeeded", "what has ended stays as it is"
    assert (await server.submit("job-1")).state == "cancelled", "its id is taken"
    with pytest.raises(NotFoundError):
        await server.queue.cancel("nobody")


async def test_failures_are_told(server: Server) -> None:
    server.work.error = TrainingError("the loss is not finite")
    server.work.leave.set()
    await server.submit("job-1")
    failed = await server.queue.wait("job-1", 60)
    assert failed.error is not None
    assert (failed.state, failed.error.code) == ("failed", "training_failed")
    server.work.error = KeyError("unforeseen")
    await server.submit("job-2")
    assert (await server.queue.wait("job-2", 60)).state == "failed"
    server.work.error = None
    await server.submit("job-3")
    assert (await server.queue.wait("job-3", 60)).state == "succeeded"


async def test_an_end_that_cannot_be_recorded_is_told_all_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RECORD_AGAIN_S", 0.02)
    move = server.store.move
    await server.submit("job-1")
    await server.until("job-1", "running")

    async def full(*_: Any, **__: Any) -> JobStatus:
        raise ArtError("disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(server.store, "move", full)
        patched.setattr(server.store, "finish", full)
        server.work.leave.set()
        assert (await server.queue.wait("job-1", 60)).state == "failed"
        assert (await server.store.status("job-1")).state == "running"
    assert server.store.move == move
    async with asyncio.timeout(60):
        while (await server.store.status("job-1")).state != "failed":
            await asyncio.sleep(0.005)


async def test_all_of_it_survives_the_death_of_the_server(tmp_path: Path) -> None:
    first = await Server(tmp_path).start()
    for job_id, project in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")]:
        await first.submit(job_id, project)
    await first.until("a1", "running")
    await first.queue.cancel("a3")
    tasks = list(first.queue._tasks)
    for task in tasks:  # as kill -9 does: nobody gets to write anything
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    first.database.close()

    second = await Server(tmp_path).start()
    assert (await second.queue.status("a3")).state == "cancelled"
    assert await second.submit("a2", "a") == await second.queue.status("a2")
    second.work.leave.set()
    for job_id in ("a1", "a2", "b1"):
        assert (await second.queue.wait(job_id, 60)).state == "succeeded"
    assert second.work.order == ["a1", "b1", "a2"]
    with pytest.raises(ConflictError):
        await second.queue.submit("a1", "train", ("a", "m"), PAYLOAD, "2")
    assert all(status.state in ENDED for status in await second.queue.find())
    await second.close()


async def test_work_that_is_stopped_in_the_end_has_not_been_done(server: Server) -> None:
    """The stop comes when the work is over but for its record: the table decides."""
    await server.submit("job-1")
    await server.until("job-1", "running")
    server.work.error = JobCancelledError("stopped")
    await server.queue.cancel("job-1")
    assert (await server.queue.wait("job-1", 60)).state == "cancelled"
    assert server.published == []


async def test_jobs_tell_how_they_go_on(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    heard = server.heard
    try:
        await server.submit("one-job-a", "p", "m")
        await server.submit("two-job-b", "p", "other")
        await server.until("one-job-a", "running")
        running, queued = (activity for _, activity in server.queue.activity())
        assert (running.runs, running.runs_before, queued.runs) == (True, None, False)
        assert (queued.queue_place, queued.runs_before) == (1, "p/m")
        server.work.errors["two-job-b"] = TrainingError("no memory\nstack")
        server.work.leave.set()
        await server.until("one-job-a", "succeeded")
        await server.until("two-job-b", "failed")
    finally:
        await server.close()
    first = [news for project, news in heard if news.kind == "job_progress" and news.job_id == "one-job-a"]
    assert {project for project, _ in heard} == {"p"}
    assert [news.state for news in first] == ["queued", "running", "running", "running", "succeeded"]
    assert [(news.phase, news.done, news.total) for news in first[2:4]] == [("train", 1, 2), ("train", 2, 2)]
    (step,) = [news for _, news in heard if news.kind == "step" and news.name == "m"]
    assert (step.step, step.metrics) == (8, {})
    last = heard[-1][1]
    assert (last.state, last.error) == ("failed", "no memory")
