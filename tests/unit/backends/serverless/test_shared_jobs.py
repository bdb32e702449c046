"""Two processes that train one model at the serverless service, with one folder: no step is lost or mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import art
from art.backends.serverless import sent_jobs
from art.backends.serverless.sent_jobs import SentJob, SentJobs
from art.errors import InvalidRequestError, StorageError, TrainingError
from art.storage.lock import locked
from tests.support.fake_serverless import FakeServerless, Hold, Trouble, status
from tests.support.serverless_runs import QUICK, group, new_model, open_backend

JOBS = "/preview/training-jobs"
PATIENT = replace(QUICK, lost_job_s=10_000.0)


@pytest.fixture
async def fake() -> AsyncIterator[FakeServerless]:
    async with FakeServerless().running() as fake:
        yield fake


@contextlib.asynccontextmanager
async def process(
    fake: FakeServerless, folder: Path
) -> AsyncIterator[tuple[art.ServerlessBackend, art.TrainableModel]]:
    """A backend with a model that share nothing with others but the folder."""
    async with open_backend(fake, folder, PATIENT) as backend:
        model = new_model(folder)
        await model.register(backend)
        yield backend, model


def stored(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "shop/models/agent/sent_jobs.json").read_text())["jobs"]


async def test_steps_of_two_processes_run_one_after_the_other(fake: FakeServerless, tmp_path: Path) -> None:
    async with process(fake, tmp_path) as (first, model), process(fake, tmp_path) as (second, same_model):
        groups = [await group(model, 0.0, 1.0)]
        hold = Hold()
        fake.trouble["/checkpoints"] = [hold, hold]
        calls = [asyncio.create_task(one.train(same_model, groups)) for one in (first, second)]
        await hold.until(2)  # both have seen that no step of the model is running
        hold.answer.set_result(None)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls)
    assert sorted(result.step for result in results) == [1, 2]
    assert [job["from_step"] for job in stored(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("answer", "expected"), [(status(422), InvalidRequestError), (None, TrainingError)], ids=["refused", "fails"]
)
async def test_a_registration_sees_what_becomes_of_the_step_that_another_process_sends(
    fake: FakeServerless, tmp_path: Path, answer: Trouble | None, expected: type[Exception]
) -> None:
    async with process(fake, tmp_path) as (backend, model):
        groups = [await group(model, 0.0, 1.0)]
        hold = Hold()
        fake.trouble[JOBS], fake.outcome = [hold], ["fails"]
        call = asyncio.create_task(backend.train(model, groups))
        await hold.until(1)
        num_requests = len(fake.requests)
        registration = asyncio.create_task(_register(fake, tmp_path))
        async with asyncio.timeout(60):
            while sum("/checkpoints" in request for request in fake.requests[num_requests:]) < 2:
                await asyncio.sleep(0.001)
            hold.answer.set_result(answer)
            with pytest.raises(expected):
                await call
            assert await registration == 0


async def _register(fake: FakeServerless, folder: Path) -> int:
    async with process(fake, folder) as (_, model):
        return await model.get_step()


def job(name: str) -> SentJob:
    return SentJob(
        job_id=name, kind="train", digest="", model_id="model-1", from_step=0, sent_at=time.time(), metrics={}
    )  # fmt: skip


def test_jobs_that_are_written_at_once_are_all_kept(tmp_path: Path) -> None:
    def write(name: str) -> None:
        own = SentJobs(tmp_path / "sent_jobs.json")
        for number in range(20):
            own.put(job(f"{name}-{number}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(SentJobs(tmp_path / "sent_jobs.json").unfinished("model-1")) == 40


def test_a_process_that_never_ends_its_change_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_jobs, "LOCK_WAIT_S", 0.0)
    jobs = SentJobs(tmp_path / "sent_jobs.json")
    with (
        locked(jobs._lock, what="testing", wait_s=60.0),
        pytest.raises(StorageError, match=r"another program has been changing .*sent_jobs\.json"),
    ):
        jobs.put(job("one"))
