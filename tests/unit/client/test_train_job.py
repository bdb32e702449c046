"""`train(..., wait=False)`: a job to await, follow again and cancel, whose failure is not lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx2
import pytest
from openai.types.chat.chat_completion import Choice

from art.backend import Backend
from art.client.training import TrainJob, TrainResult
from art.errors import ConfigError, HandshakeError, NotFoundError, NothingTrainableError
from art.model import TrainableModel
from art.protocol.training import RegisterRequest, WireError
from art.trajectory import Trajectory, TrajectoryGroup
from tests.support.fake_art_server import FakeArtServer

JOB = "step-00000001"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and polls without the waiting."""
    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: real_sleep(0))


@pytest.fixture
async def server() -> FakeArtServer:
    server = FakeArtServer()
    async with server.client() as client:
        await client.register(RegisterRequest(project="p", name="m", base_model="base"))
    server.requests.clear()
    return server


@pytest.fixture
def backend(server: FakeArtServer) -> Backend:
    backend = Backend()
    backend._client = server.client()
    return backend


@pytest.fixture
def model() -> TrainableModel:
    return TrainableModel(project="p", name="m", base_model="base")


def groups(*rewards: float) -> list[TrajectoryGroup]:
    message = {"role": "assistant", "content": "yes"}
    answer = Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, "exchange_id": "e1"})
    items: list[Any] = [{"role": "user", "content": "yes?"}, answer]
    return [TrajectoryGroup([Trajectory(messages_and_choices=items, reward=reward) for reward in rewards])]


async def result_of(job: TrainJob) -> TrainResult:
    return await job


async def test_a_job_goes_on_while_the_program_does_something_else(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    server.polls_until_done = 3
    job = await backend.train(model, groups(0, 1), wait=False, job_id=JOB)
    assert isinstance(job, TrainJob)
    assert (job.job_id, job.done(), (await job.status()).state) == (JOB, False, "running")
    waiting = asyncio.create_task(result_of(job))
    await asyncio.sleep(0)
    waiting.cancel()  # a caller that gives up does not stop the job
    first, second = await asyncio.gather(job, job)
    assert first == second
    assert (first.step, first.metrics, job.done()) == (1, {"loss/train": 0.5}, True)
    assert server.trained == [JOB]


async def test_another_process_follows_the_job_and_the_same_name_trains_once(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    await backend.train(model, groups(0, 1), wait=False, job_id=JOB)
    later = Backend()
    later._client = server.client()
    assert (await (await later.follow_train_job(model, JOB))).step == 1
    assert (await later.train(model, groups(0, 1), job_id=JOB)).step == 1
    sft = await later.train_sft(model, groups(1)[0], wait=False)
    assert (await sft).step == 2
    assert server.trained == [JOB, sft.job_id]


async def test_a_lost_connection_and_a_server_that_forgot_the_job_do_not_end_it(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    job = await backend.train(model, groups(0, 1), wait=False, job_id=JOB)
    server.trouble = [httpx2.ReadError("reset"), server.restart_without_jobs]
    assert (await job).step == 1
    posts = [body["job_id"] for method, path, body in server.requests if path.endswith("/train")]
    assert posts == [JOB, JOB]


async def test_what_is_wrong_with_the_request_is_raised_at_once(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    with pytest.raises(NothingTrainableError):
        await backend.train(model, [], wait=False)
    with pytest.raises(ConfigError, match="`job_id` must be 8 to 64"):
        await backend.train(model, groups(0, 1), wait=False, job_id="1")
    assert server.requests == []


async def test_a_job_that_is_not_there_or_is_another_model_s_is_not_followed(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    with pytest.raises(NotFoundError, match="unknown job"):
        await backend.follow_train_job(model, JOB)
    await backend.train(model, groups(0, 1), wait=False, job_id=JOB)
    other = TrainableModel(project="p", name="other", base_model="base")
    with pytest.raises(NotFoundError, match=r"is train of p/m"):
        await backend.follow_train_job(other, JOB)


async def test_a_failure_that_nobody_awaits_is_logged_and_can_still_be_awaited(
    server: FakeArtServer, backend: Backend, model: TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    server.job_error = WireError(code="handshake_failed", message="2 nats")
    with caplog.at_level(logging.ERROR, logger="art.client.training"):
        job = await backend.train(model, groups(0, 1), wait=False, job_id=JOB)
        while not job.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert f"training job {JOB} failed while nothing awaited it: HandshakeError: 2 nats" in caplog.text
    with pytest.raises(HandshakeError, match="2 nats"):
        await job
    caplog.clear()
    job = await backend.train(model, groups(0, 1), wait=False)
    with pytest.raises(HandshakeError):
        await job
    assert caplog.text == ""


async def test_nothing_to_learn_is_a_result_or_an_error_as_asked(
    server: FakeArtServer, backend: Backend, model: TrainableModel
) -> None:
    server.nothing_to_learn = True
    job = await backend.train(model, groups(1, 1), wait=False)
    assert (await job).trained is False
    strict = await backend.train(model, groups(1, 1), wait=False, on_nothing="raise")
    with pytest.raises(NothingTrainableError, match="equal rewards"):
        await strict
