"""The client against the real HTTP application, over a runtime that only remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from art.client.client import ServerClient, model_path
from art.client.submission import wire_groups
from art.config import ModelSettings, ServerConfig, TrainConfig
from art.errors import (
    AuthenticationError,
    HandshakeError,
    JobCancelledError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    ProcessError,
)
from art.protocol.checkpoint_calls import CheckpointInfo, CheckpointList
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
    WireError,
)
from art.server.app import App
from art.trajectory import Trajectory, TrajectoryGroup

ROLLOUT = RolloutStatus(
    rollout_id="r1", project="p", model="p/m", group_id="g", scenario_id=None, reward=0.5, outcome="ok", error=None,
    metrics={"turns": 2.0}, metadata={"n": 1, "won": True}, num_exchanges=2, first_policy_version=1,
    last_policy_version=2, trained_by=None, created_at=1.5,
)  # fmt: skip
STATUS = ModelStatus(project="p", name="m", base_model="b", step=3, inference_name="p/m")


class Rollouts:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def get(self, rollout_id: str, project: str | None) -> RolloutRecord:
        histories = [{"messages_and_choices": [{"role": "user", "content": rollout_id}], "tools": None}]
        return RolloutRecord(**ROLLOUT.model_dump(), histories=histories)

    async def put(self, rollout_id: str, update: RolloutUpdate, project: str | None) -> RolloutStatus:
        self.asked.append((rollout_id, update))
        return ROLLOUT

    async def page(self, query: RolloutQuery) -> RolloutPage:
        self.asked.append(query)
        return RolloutPage(rollouts=[ROLLOUT], next_since=7)


class Gateway:
    rollouts = Rollouts()


class Runtime:
    gateway = Gateway()

    def __init__(self) -> None:
        self.models = self.registration = self.training = self.checkpoints = self
        self.jobs = Jobs(self)
        self.asked: list[Any] = []
        self.errors: list[Exception] = []
        self.result: Any = "succeeded"

    def note(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.errors:
            raise self.errors.pop(0)

    async def health(self) -> dict[str, Any]:
        self.note("health")
        return {"status": "ok"}

    async def register(self, request: RegisterRequest, check_folder: Any) -> ModelStatus:
        self.note(request)
        return STATUS

    async def status(self, project: str, name: str) -> ModelStatus:
        self.note(project, name)
        return STATUS

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(step=step, created_at=1.0, size_bytes=9, full=False, newest=step == 3, best=step == 1)
            for step in (1, 3)
        ]

    async def delete(self, project: str, name: str, request: DeleteCheckpointsRequest) -> list[int]:
        self.note(*request.keep_steps)
        return [0, 2]

    def job(self, kind: Any, job_id: str, state: Any) -> JobStatus:
        error = WireError(code="handshake_failed", message="2 nats") if state == "failed" else None
        step = 4 if state == "succeeded" else None
        return JobStatus(job_id=job_id, kind=kind, project="p", name="m", state=state, step=step, error=error)

    async def train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        self.note(request)
        return self.job("train", request.job_id, "queued")

    async def train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        self.note(request)
        return self.job("train_sft", request.job_id, "queued")


class Jobs:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        self.runtime.note(job_id, timeout_s)
        return self.runtime.job("train", job_id, self.runtime.result)

    async def find(self, *, project: str | None, name: str | None, unfinished: bool, limit: int) -> list[JobStatus]:
        self.runtime.note(project, name, unfinished, limit)
        return [self.runtime.job("train", "job-0001", "running")]

    async def cancel(self, job_id: str) -> JobStatus:
        self.runtime.note("cancel", job_id)
        return self.runtime.job("train", job_id, "cancelling")


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def connect(runtime: Runtime, api_key: str = "key", **options: Any) -> ServerClient:
    app = App(runtime, api_key="key", config=ServerConfig(max_body_bytes=20_000))  # type: ignore[arg-type]
    return ServerClient("http://art.test", api_key, transport=httpx2.ASGITransport(app), **options)


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[ServerClient]:
    async with connect(runtime) as client:
        yield client


def request(content: str = "hi") -> TrainRequest:
    trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": content}], reward=1)
    return TrainRequest(job_id="job-0001", groups=wire_groups([TrajectoryGroup([trajectory])]), config=TrainConfig())


async def test_every_call_arrives_as_it_was_made(client: ServerClient, runtime: Runtime) -> None:
    register = RegisterRequest(project="p", name="m", base_model="b", settings=ModelSettings())
    assert (await client.health())["status"] == "ok"
    assert await client.register(register) == STATUS
    assert await client.model_status("p", "m") == STATUS
    assert (await client.typed(CheckpointList, "GET", model_path("p", "m", "checkpoints"))).steps == [1, 3]
    path, keep = model_path("p", "m", "checkpoints/delete"), DeleteCheckpointsRequest(keep_steps=[3])
    deleted = await client.typed(DeleteCheckpointsResponse, "POST", path, body=keep)
    assert deleted.deleted_steps == [0, 2]
    assert (await client.run_job("train", "p", "m", request())).step == 4
    sft = TrainSFTRequest(job_id="job-0002", trajectories=request().groups[0].trajectories)
    assert (await client.run_job("train_sft", "p", "m", sft)).step == 4
    assert runtime.asked == [
        ("health",),
        (register,),
        ("p", "m"),
        (3,),
        (request(),),
        ("job-0001", 20.0),
        (sft,),
        ("job-0002", 20.0),
    ]
    (history,) = (await client.get_rollout("r1")).histories
    assert history["messages_and_choices"] == [{"role": "user", "content": "r1"}]


async def test_calls_about_rollouts_arrive_as_they_were_made(client: ServerClient, runtime: Runtime) -> None:
    update = RolloutUpdate(model="p/m", group_id="g/1 2", reward=0.5, metadata={"n": 1, "won": True})
    query = RolloutQuery(project="p", group_id="g/1 2", finished=True, trained=False, since=3, limit=50)
    assert await client.put_rollout("r1", update) == ROLLOUT
    page = await client.list_rollouts(query)
    assert (page.rollouts, page.next_since) == ([ROLLOUT], 7)
    assert runtime.gateway.rollouts.asked == [("r1", update), query]


async def test_errors_arrive_as_what_was_raised(client: ServerClient, runtime: Runtime) -> None:
    runtime.errors = [NotFoundError("unknown model p/m; registered: p/n", param="model")]
    with pytest.raises(NotFoundError, match="registered: p/n") as caught:
        await client.model_status("p", "m")
    assert caught.value.param == "model"
    runtime.result = "failed"
    with pytest.raises(HandshakeError, match="2 nats"):
        await client.run_job("train", "p", "m", request())
    with pytest.raises(PayloadTooLargeError):
        await client.run_job("train", "p", "m", request("x" * 30_000))
    async with connect(runtime, api_key="wrong") as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.model_status("p", "m")


async def test_a_model_that_cannot_be_loaded_is_not_waited_for(client: ServerClient, runtime: Runtime) -> None:
    final = ProcessError("the engine did not start, three times")
    final.transient = False
    runtime.errors = [final]
    with pytest.raises(ProcessError, match="three times"):
        await client.model_status("p", "m")
    assert len(runtime.asked) == 1


async def test_an_engine_that_restarts_is_waited_for(client: ServerClient, runtime: Runtime) -> None:
    runtime.errors = [ProcessError("the engine is starting"), OverloadedError("full")]
    OverloadedError.retry_after_s, before = 0.01, OverloadedError.retry_after_s
    try:
        assert await client.model_status("p", "m") == STATUS
    finally:
        OverloadedError.retry_after_s = before
    assert len(runtime.asked) == 3
    async with connect(runtime, unreachable_deadline_s=0.1) as impatient:
        runtime.errors = [ProcessError("the engine is starting")] * 99
        with pytest.raises(ProcessError, match="the engine is starting"):
            await impatient.model_status("p", "m")


# --- jobs ---


async def test_lists_and_cancelling(client: ServerClient, runtime: Runtime) -> None:
    (job,) = await client.list_jobs(project="p", unfinished=True)
    assert (job.job_id, job.state) == ("job-0001", "running")
    assert (await client.cancel_job("job-0001")).state == "cancelling"
    assert runtime.asked == [("p", None, True, 100), ("cancel", "job-0001")]
    runtime.result = "cancelled"
    with pytest.raises(JobCancelledError, match=r"training of p/m was cancelled \(job job-0001\)"):
        await client.run_job("train", "p", "m", request())
