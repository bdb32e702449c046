"""The HTTP client and the backend on top of it: errors, retries, restarts, what is sent."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

import art
import art.client.client
import art.client.http
from art.backend import Backend, TrainResult
from art.client.client import ServerClient
from art.client.submission import wire_groups
from art.client.terminal import announce_wait
from art.client.training import REMIND_AFTER_STEPS
from art.config import ModelSettings, OptimizerConfig, TrainConfig, VllmConfig
from art.errors import (
    ArtError,
    AuthenticationError,
    ConfigError,
    ContextLengthError,
    HandshakeError,
    NotFoundError,
    NothingTrainableError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ProcessError,
    TrajectoryError,
    TrajectoryMismatchError,
)
from art.model import TrainableModel
from art.protocol.checkpoint_calls import CheckpointList
from art.protocol.training import RegisterRequest, TrainRequest, WireError
from art.trajectory import History, Trajectory, TrajectoryGroup
from openpipe_art.dev import optimizer_from_internal_config, settings_from_internal_config
from tests.support.fake_art_server import FakeArtServer, refusal

REGISTER = RegisterRequest(project="p", name="m", base_model="base")


@pytest.fixture
def server() -> FakeArtServer:
    return FakeArtServer()


@pytest.fixture(autouse=True)
def quick_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retry delays without the waiting."""
    delays: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return delays


def choice(**fields: Any) -> Choice:
    message = {"role": "assistant", "content": "yes"}
    return Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, **fields})


def a_group(*rewards: float) -> TrajectoryGroup:
    items = [{"role": "user", "content": "yes?"}, choice(exchange_id="e1")]
    return TrajectoryGroup([Trajectory(messages_and_choices=items, reward=reward) for reward in rewards])


def train_request(job_id: str = "job-0001") -> TrainRequest:
    return TrainRequest(job_id=job_id, groups=wire_groups([a_group(0, 1)]))


async def test_every_endpoint(server: FakeArtServer) -> None:
    async with server.client() as client:
        assert (await client.health())["status"] == "ok"
        status = await client.register(REGISTER)
        assert status.inference_name == "p/m"
        done = await client.run_job("train", "p", "m", train_request())
        assert (done.step, done.metrics, done.checkpoint_path) == (1, {"loss/train": 0.5}, "/data/0001")
        assert (await client.model_status("p", "m")).step == 1
        assert (await client.typed(CheckpointList, "GET", "/api/models/p/m/checkpoints")).steps == [0, 1]
    assert {header["authorization"] for header in server.headers} == {"Bearer key"}


@pytest.mark.parametrize(
    ("response", "kind", "text"),
    [
        (refusal(400, "context_length_exceeded", "too long"), ContextLengthError, "too long"),
        (refusal(404, "not_found", "unknown model x"), NotFoundError, "unknown model x"),
        (refusal(401, "invalid_api_key"), AuthenticationError, "no"),
        (refusal(500, "a_code_of_the_future", "hm"), ArtError, "hm"),
        (httpx2.Response(403, text="<html>proxy</html>"), PermissionDeniedError, "proxy"),
        (httpx2.Response(413, text="big"), PayloadTooLargeError, "413"),
        (httpx2.Response(500, json={"error": "text"}), ArtError, "500"),
        (httpx2.Response(500, json=["x"]), ArtError, "500"),
        (httpx2.Response(200, text="hello"), ArtError, "is this an ART server"),
        (httpx2.Response(200, json=[1]), ArtError, "is this an ART server"),
    ],
)
async def test_errors_come_back_as_their_class(
    server: FakeArtServer, response: httpx2.Response, kind: type[ArtError], text: str
) -> None:
    server.trouble = [lambda request: response]
    async with server.client() as client:
        with pytest.raises(ArtError, match=text) as caught:
            await client.health()
    assert type(caught.value) is kind
    assert len(server.requests) == 1, "not repeated"


async def test_answer_of_another_version_is_named(server: FakeArtServer) -> None:
    server.trouble = [lambda request: httpx2.Response(200, json={"job_id": "x"})]
    async with server.client() as client:
        with pytest.raises(ArtError, match="same version"):
            await client.job_status("x")


@pytest.mark.parametrize(
    "trouble",
    [
        httpx2.ConnectError("refused"),
        httpx2.RemoteProtocolError("closed"),
        httpx2.ReadTimeout("late"),
        lambda request: httpx2.Response(502),
        lambda request: refusal(503, "process_unavailable"),
        lambda request: httpx2.Response(504, text="x"),
    ],
)
async def test_lost_answers_are_asked_for_again(server: FakeArtServer, trouble: Any, quick_sleep: list[float]) -> None:
    server.trouble = [trouble, trouble]
    async with server.client() as client:
        assert (await client.register(REGISTER)).step == 0
    assert len(server.requests) == 3
    assert len(quick_sleep) == 2
    assert quick_sleep == sorted(quick_sleep)
    assert 0 < quick_sleep[0] < 0.1


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("s3cret\nkey 1 (ci): keep it", "a line break at place 7 of 26"),
        ("s3cret key", "a space at place 7 of 10"),
        ("s3cret\tkey", "a control character at place 7"),
        ("s3crét", "a character outside of ASCII at place 5"),
    ],
)
def test_a_key_that_no_header_can_hold_is_refused_unseen(
    key: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusals = [lambda: ServerClient("http://art.test", key), lambda: art.RemoteBackend("http://art.test", key)]
    model = art.Model[None](name="m", project="p", inference_base_url="http://art.test/v1", inference_api_key=key)
    refusals += [model.openai_client, lambda: art.LocalBackend(path=tmp_path)]
    monkeypatch.setenv("ART_API_KEY", key)
    for make in refusals:
        with pytest.raises(ConfigError, match=what) as caught:
            make()
        assert "s3c" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:8000/v1", "ftp://a/v1", "http://"])
def test_a_model_at_no_address_has_no_client(address: str) -> None:
    model = art.Model[None](name="m", project="p", inference_base_url=address, inference_api_key="k")
    for make in (model.openai_client, model.blocking_openai_client):
        with pytest.raises(ConfigError, match="like http://host:8000/v1"):
            make()


async def test_a_certificate_that_is_not_accepted_is_not_tried_again(
    server: FakeArtServer, quick_sleep: list[float]
) -> None:
    refused = httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    refused.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    refused.__cause__.verify_message = "self-signed certificate"
    server.trouble = [refused]
    async with server.client() as client:
        with pytest.raises(ConfigError, match="self-signed"):
            await client.health()
    assert len(server.requests) == 1
    assert quick_sleep == []


async def test_overload_waits_as_long_as_the_server_says(server: FakeArtServer, quick_sleep: list[float]) -> None:
    server.trouble = [lambda request: refusal(429, "overloaded", **{"retry-after": "7"})]
    async with server.client() as client:
        await client.health()
    assert 5 < quick_sleep[0] < 9


async def test_a_server_that_stays_away_is_an_error_with_its_address(server: FakeArtServer) -> None:
    async with server.client(unreachable_deadline_s=0.05) as client:
        await client.health()
        server.trouble = [httpx2.ConnectError("refused")] * 1000
        with pytest.raises(ProcessError, match=r"http://art\.test gave no answer for .*refused"):
            await client.health()
    assert len(server.requests) > 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "gpu.invalid"])
async def test_an_address_where_nobody_listens_is_said_soon(host: str) -> None:
    port = free_port()
    start = f"art-server --port {port}" if host == "127.0.0.1" else f"art-server --host 0.0.0.0 --port {port}"
    async with ServerClient(f"http://{host}:{port}", "key", unreachable_deadline_s=0.05) as client:
        with pytest.raises(ProcessError, match=f"no ART server listens at http://{host}:{port} .*`{start}`"):
            await client.register(REGISTER)


async def test_a_server_that_was_reached_once_is_waited_for(server: FakeArtServer) -> None:
    async with server.client() as client:
        server.trouble = [httpx2.ReadError("reset")]  # something listened, and died
        await client.health()
        server.trouble = [httpx2.ConnectError("refused")] * 20
        await client.health()


async def test_a_job_is_polled_until_it_ends(server: FakeArtServer) -> None:
    server.polls_until_done = 3
    async with server.client() as client:
        await client.register(REGISTER)
        assert (await client.run_job("train", "p", "m", train_request())).step == 1
    polls = [path for _, path, _ in server.requests if path == "/api/jobs/job-0001"]
    assert len(polls) == 3


async def test_a_lost_submission_trains_once(server: FakeArtServer) -> None:
    def taken_but_unanswered(request: httpx2.Request) -> httpx2.Response:
        server.answer(request, json.loads(request.content))
        raise httpx2.ReadError("reset", request=request)

    async with server.client() as client:
        await client.register(REGISTER)
        server.trouble = [taken_but_unanswered]
        await client.run_job("train", "p", "m", train_request())
    assert server.trained == ["job-0001"]


async def test_a_restart_that_lost_the_job_gets_it_again_under_its_id(
    server: FakeArtServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with server.client() as client:
        await client.register(REGISTER)
        server.trouble = [None, server.restart_without_jobs, lambda request: httpx2.Response(503)]
        with caplog.at_level(logging.WARNING):
            done = await client.run_job("train", "p", "m", train_request())
    assert done.step == 1
    assert server.trained == ["job-0001"]
    submitted = [body for method, path, body in server.requests if path.endswith("/train")]
    assert len(submitted) == 2
    assert submitted[0] == submitted[1]
    assert "does not know job job-0001" in caplog.text


async def test_a_failed_job_raises_its_error(server: FakeArtServer) -> None:
    server.job_error = WireError(code="handshake_failed", message="differs by 2 nats")
    async with server.client() as client:
        await client.register(REGISTER)
        with pytest.raises(HandshakeError, match="2 nats"):
            await client.run_job("train", "p", "m", train_request())


async def test_a_job_that_never_ends(server: FakeArtServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(art.client.client, "JOB_DEADLINE_S", 0.02)
    server.polls_until_done = 10**9
    async with server.client() as client:
        await client.register(REGISTER)
        with pytest.raises(ProcessError, match=r"gave up on training of p/m: job job-0001 is still"):
            await client.run_job("train", "p", "m", train_request())


async def test_waits_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), announce_wait("the moon", every_s=0.01):
        async with asyncio.timeout(60):
            while len(caplog.records) < 2:
                await asyncio.sleep(0.01)
    lines = [record.message for record in caplog.records]
    assert len(lines) >= 2
    assert lines[0].startswith("still waiting for the moon")
    await asyncio.sleep(0.03)
    assert len(caplog.records) == len(lines), "silent after the wait"


@pytest.mark.parametrize("url", ["", "localhost:5000", "ftp://x", "http://", "http://a\x00b", "http://a:b"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        ServerClient(url)


def test_v1_in_the_address_is_forgiven() -> None:
    assert ServerClient("http://h:1/v1/").base_url == "http://h:1"


def test_one_client_serves_several_event_loops(server: FakeArtServer) -> None:
    client = server.client()
    for _ in range(3):
        asyncio.run(client.health())
    assert len(server.requests) == 3


# --- the backend ---


class FakeBackend(Backend):
    def __init__(self, server: FakeArtServer) -> None:
        super().__init__()
        self._client = server.client()


class Named:
    name, project, trainable, base_model = "m", "p", True, "base"

    def model_settings(self) -> ModelSettings:
        return ModelSettings()

    def default_optimizer(self) -> OptimizerConfig | None:
        return None

    async def record_settings(self, settings: Mapping[str, Any]) -> None:
        """Record nothing."""


class Clipped(Named):
    def default_optimizer(self) -> OptimizerConfig | None:
        return OptimizerConfig(max_grad_norm=0.1)


@pytest.fixture
async def backend(server: FakeArtServer) -> Backend:
    backend = FakeBackend(server)
    await backend.register(Named())
    return backend


async def test_train_sends_groups_and_config(server: FakeArtServer, backend: Backend) -> None:
    items = [
        {"role": "user", "content": "a"},
        choice(exchange_id="e1", logprobs={"content": [{"token": "t", "logprob": -1, "top_logprobs": []}]}),
        {"role": "user", "content": "b"},
        choice(logprobs={"content": [{"token": "t", "logprob": -1, "top_logprobs": []}]}),
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    side = History(messages_and_choices=[{"role": "user", "content": "c"}, choice(exchange_id="e2")])
    trajectory = Trajectory(messages_and_choices=items, reward=2, tools=tools, additional_histories=[side, History()])
    result = await backend.train(Named(), [TrajectoryGroup([trajectory]), TrajectoryGroup([ValueError("x")])])
    assert (result.step, result.checkpoint_path) == (1, "/data/0001")
    assert result.findings == ["groups[0]: all rewards are equal, nothing to learn"]
    body = next(body for _, path, body in server.requests if path.endswith("/train"))
    assert [len(group["trajectories"]) for group in body["groups"]] == [1, 0], "places stay, so that messages fit"
    sent = body["groups"][0]["trajectories"][0]
    assert sent["reward"] == 2
    main, other = sent["histories"]
    assert [answer["exchange_id"] for answer in main["answers"]] == ["e1", None]
    assert [answer["exchange_id"] for answer in other["answers"]] == ["e2"]
    assert "yes" not in str(sent), "the server has the texts"
    assert TrainConfig.model_validate(body["config"]) == TrainConfig()


@pytest.mark.parametrize("code", ["invalid_request_error", "trajectory_mismatch"])
async def test_texts_are_sent_where_the_server_refuses_their_names(
    server: FakeArtServer, backend: Backend, code: str
) -> None:
    """An older server does not know `answers`; a newer one asks by refusing, if a conversation was changed."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    logprobs = {"content": [{"token": "t", "logprob": -1, "top_logprobs": []}]}
    items = [
        {"role": "user", "content": "a"}, choice(exchange_id="e1", logprobs=logprobs), {"role": "user", "content": "b"},
        choice(logprobs=logprobs),
    ]  # fmt: skip
    await backend.register(Named())
    server.trouble = [lambda request: refusal(400, code)]
    await backend.train(Named(), [TrajectoryGroup([Trajectory(messages_and_choices=items, reward=2, tools=tools)])])
    short, long = (body for _, path, body in server.requests if path.endswith("/train"))
    assert short["job_id"] == long["job_id"]
    [history] = long["groups"][0]["trajectories"][0]["histories"]
    assert history.keys() == {"items", "tools"}, "an older server refuses other fields"
    assert history["tools"] == tools
    assert history["items"][0] == {"role": "user", "content": "a"}
    assert history["items"][1]["choice"]["exchange_id"] == "e1"
    assert "logprobs" not in history["items"][1]["choice"], "the server has them"
    assert history["items"][3]["choice"]["logprobs"]["content"][0]["logprob"] == -1, "nobody else has them"


async def test_texts_are_sent_once_only(server: FakeArtServer, backend: Backend) -> None:
    await backend.register(Named())
    server.trouble = [lambda request: refusal(400, "trajectory_mismatch")] * 2
    with pytest.raises(TrajectoryMismatchError):
        await backend.train(Named(), [a_group(0, 1)])
    assert len([1 for _, path, _ in server.requests if path.endswith("/train")]) == 2


async def test_a_conversation_with_a_message_that_has_no_digest_is_sent_with_its_texts(
    server: FakeArtServer, backend: Backend
) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    trajectory = Trajectory(messages_and_choices=[image, choice(exchange_id="e1")], reward=2)
    await backend.train(Named(), [TrajectoryGroup([trajectory])])
    body = next(body for _, path, body in server.requests if path.endswith("/train"))
    assert body["groups"][0]["trajectories"][0]["histories"][0]["items"][0] == image


async def test_a_finding_is_logged_when_it_is_new_and_then_rarely(
    server: FakeArtServer, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    async def train() -> TrainResult:
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": "a"}, choice()])
        server.findings = [
            "groups[3]: all rewards are equal, nothing to learn",
            f"loss/entropy is 0.00{len(server.trained)}, below 0.01: little variety. Do this",
        ]
        if len(server.trained) > 1:
            server.findings.append("loss/grad_norm is 30, above 10: clipped. Do that")
        return await backend.train(Named(), [TrajectoryGroup([trajectory])])

    results = [await train() for _ in range(REMIND_AFTER_STEPS + 1)]
    assert [len(result.findings) for result in results] == [2, 2] + [3] * (REMIND_AFTER_STEPS - 1)
    assert [record.message for record in caplog.records if record.name == "art.client.training"] == [
        "p/m step 1: loss/entropy is 0.000, below 0.01: little variety. Do this",
        "p/m step 3: loss/grad_norm is 30, above 10: clipped. Do that",
        f"p/m step {REMIND_AFTER_STEPS + 1}: loss/entropy is 0.00{REMIND_AFTER_STEPS}, below 0.01: little variety. Do this",
    ]


@pytest.mark.parametrize(
    "further",
    [
        *[{"reward": reward} for reward in (math.nan, math.inf, None, "much", "1.0")],
        *[{"turn_rewards": rewards} for rewards in ([math.nan], [None], 1.0)],
        *[{"token_rewards": rewards} for rewards in ([[math.inf]], [1.0], None)],
    ],
)
async def test_a_reward_that_is_no_number_is_refused_by_name(backend: Backend, further: dict[str, Any]) -> None:
    groups = [a_group(0, 1), a_group(0, 0)]
    for name, value in further.items():
        setattr(groups[1].trajectories[1], name, value)
    with pytest.raises(TrajectoryError, match="trajectory 1 of group 1 has reward"):
        await backend.train(Named(), groups)


async def test_turn_and_token_rewards_are_about_the_first_history(server: FakeArtServer, backend: Backend) -> None:
    side = History(messages_and_choices=[{"role": "user", "content": "c"}, choice(exchange_id="e2")])
    silent = Trajectory(additional_histories=[History(), side])
    spoken = Trajectory(messages_and_choices=side.messages_and_choices, turn_rewards=[1], token_rewards=[(0, 0.5)])
    await backend.train(Named(), [TrajectoryGroup([silent, spoken])])
    sent = next(body for _, path, body in server.requests if path.endswith("/train"))["groups"][0]["trajectories"]
    assert [len(history["answers"]) for history in sent[0]["histories"]] == [0, 1]
    assert (sent[1]["turn_rewards"], sent[1]["token_rewards"]) == ([1.0], [[0.0, 0.5]])


async def test_nothing_to_train_on(server: FakeArtServer, backend: Backend) -> None:
    num_requests = len(server.requests)
    with pytest.raises(NothingTrainableError, match="0 groups"):
        await backend.train(Named(), [], on_nothing="raise")
    failed = TrajectoryGroup([ValueError("tool is down")])
    with pytest.raises(NothingTrainableError, match="1 failed rollouts; the last of them: ValueError: tool is down"):
        await backend.train(Named(), [failed], wait=False)
    with pytest.raises(NothingTrainableError):
        await backend.train_sft(Named(), [])
    with pytest.raises(TrajectoryError, match="no messages"):
        await backend.train(Named(), [TrajectoryGroup([Trajectory(reward=1)])])
    assert len(server.requests) == num_requests, "the server is not asked"


async def test_a_step_without_any_trajectory_is_skipped(server: FakeArtServer, backend: Backend) -> None:
    await backend.train(Named(), [a_group(0, 1)])
    for groups in ([], [TrajectoryGroup([ValueError("the judge is down")])]):
        result = await backend.train(Named(), groups)
        assert (result.trained, result.step) == (False, 1)
        assert result.findings[0].startswith(f"nothing to train on: {len(groups)} groups with no trajectory")
    assert (await backend.train(Named(), [a_group(0, 1)])).step == 2


async def test_nothing_to_learn_is_a_result_and_is_logged_once(
    server: FakeArtServer, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    await backend.train(Named(), [a_group(0, 1)])
    server.nothing_to_learn = True
    results = [await backend.train(Named(), [a_group(1, 1)]) for _ in range(3)]
    assert [(result.trained, result.step) for result in results] == [(False, 1)] * 3
    assert results[0].metrics["data/step_num_groups_trainable"] == 0
    assert results[0].findings[0].startswith("every group (1) has equal rewards")
    assert [record.message for record in caplog.records if record.name == "art.client.training"] == [
        "p/m step 1: every group (1) has equal rewards: there is nothing to learn from"
    ]
    server.nothing_to_learn = False
    again = await backend.train(Named(), [a_group(0, 1)])
    assert (again.trained, again.step) == (True, 2)


async def test_who_wants_an_error_for_nothing_gets_one(server: FakeArtServer, backend: Backend) -> None:
    server.nothing_to_learn = True
    with pytest.raises(NothingTrainableError, match="equal rewards"):
        await backend.train(Named(), [a_group(1, 1)], on_nothing="raise")
    with pytest.raises(ConfigError, match='`on_nothing` is "skip" or "raise", got \'ignore\''):
        await backend.train(Named(), [a_group(0, 1)], on_nothing="ignore")  # type: ignore[arg-type]
    server.nothing_to_learn = False
    assert (await backend.train(Named(), [a_group(0, 1)], on_nothing="raise")).trained


async def test_rewards_that_were_never_set_are_sent_as_such(server: FakeArtServer, backend: Backend) -> None:
    items = a_group(0).trajectories[0].messages_and_choices
    group = TrajectoryGroup([Trajectory(messages_and_choices=items) for _ in range(3)])
    group.trajectories[1].reward = 0.0
    group.trajectories[2].reward = np.float32(0.5)  # type: ignore[assignment]
    await backend.train(Named(), [group])
    body = next(body for _, path, body in server.requests if path.endswith("/train"))
    assert [trajectory["reward"] for trajectory in body["groups"][0]["trajectories"]] == [None, 0.0, 0.5]


async def gathered() -> list[TrajectoryGroup]:
    return [a_group(0, 1)]


async def run_rollout() -> Trajectory:
    return a_group(1).trajectories[0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda: a_group(0, 1), "`trajectory_groups` is a TrajectoryGroup, not a list of TrajectoryGroup"),
        (lambda: list(a_group(0, 1)), r"`trajectory_groups\[0\]` is a Trajectory, not a TrajectoryGroup: pass what"),
        (gathered, r"is a coroutine that was not awaited, .*`groups = await art.gather_trajectory_groups\(...\)`"),
        (
            lambda: art.gather_trajectory_groups([TrajectoryGroup([run_rollout(), run_rollout()])]),
            "is a coroutine that was not awaited",
        ),
        (lambda: TrajectoryGroup([run_rollout()]), "`trajectory_groups` is a group that was not awaited"),
        (
            lambda: [TrajectoryGroup(run_rollout() for _ in range(2)) for _ in range(2)],
            r"`trajectory_groups\[0\]` is a group that was not awaited, not a TrajectoryGroup",
        ),
        (lambda: [a_group(0, 1), run_rollout()], r"`trajectory_groups\[1\]` is a coroutine that was not awaited"),
        (
            lambda: [list(a_group(0, 1))],
            r"`trajectory_groups\[0\]` is a list, not a TrajectoryGroup",
        ),
        (lambda: [a_group(0, 1), ValueError("x")], r"\[1\]` is a ValueError: ValueError\('x'\), not a"),
        (lambda: None, "`trajectory_groups` is None, not a list of TrajectoryGroup: pass what"),
        (lambda: 3, "`trajectory_groups` is an int: 3, not a list"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_what_is_no_list_of_groups_is_named(
    server: FakeArtServer, backend: Backend, groups: Callable[[], Any], message: str
) -> None:
    num_requests = len(server.requests)
    with pytest.raises(TrajectoryError, match=message):
        await backend.train(Named(), groups())
    gc.collect()
    assert len(server.requests) == num_requests, "the server is not asked"


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        (
            lambda: ["a"],
            r"`trajectories\[0\]` is a str: 'a', not a Trajectory: .*make a trajectory of each conversation",
        ),
        (lambda: "data.jsonl", "`trajectories` is a str: 'data.jsonl', not a list of Trajectory"),
        (lambda: [a_group(0, 1)], r"\[trajectory for group in groups for trajectory in group\]"),
        (lambda: a_group(0).trajectories[0], "`trajectories` is a Trajectory, not a list of Trajectory"),
        (lambda: [run_rollout()], r"is a coroutine that was not awaited, .*await art.gather_trajectories\(...\)"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_what_is_no_list_of_trajectories_is_named(
    backend: Backend, trajectories: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await backend.train_sft(Named(), trajectories())
    gc.collect()


async def test_a_config_of_another_kind_is_named(server: FakeArtServer, backend: Backend) -> None:
    trajectories = a_group(0, 1).trajectories
    with pytest.raises(ConfigError, match=r"`config` takes an art\.TrainSFTConfig\(\.\.\.\), got TrainConfig\("):
        await backend.train_sft(Named(), trajectories, TrainConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`config` takes an art\.TrainConfig\(\.\.\.\), got 1e-05"):
        await backend.train(Named(), [a_group(0, 1)], config=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`learning_rate` must be greater than 0, got -1"):
        await backend.train(Named(), [a_group(0, 1)], config={"learning_rate": -1})  # type: ignore[arg-type]
    await backend.train(Named(), [a_group(0, 1)], config={"learning_rate": 1e-4})  # type: ignore[arg-type]
    body = next(body for _, path, body in server.requests if path.endswith("/train"))
    assert body["config"]["learning_rate"] == 1e-4


async def test_an_item_that_is_no_message_is_named_with_its_trajectory(backend: Backend) -> None:
    groups = [a_group(0, 1)]
    groups[0].trajectories[1].messages_and_choices.append("yes")  # type: ignore[arg-type]
    with pytest.raises(
        TrajectoryError, match=r"trajectory 1 of group 0, messages_and_choices\[2\]: expected a message"
    ):
        await backend.train(Named(), groups)


async def test_an_empty_group_is_said(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    await backend.train(Named(), [a_group(0, 1), TrajectoryGroup([]), TrajectoryGroup([KeyError("tool")])])
    assert [record.message for record in caplog.records if record.name == "art.client.submission"] == [
        "group 1 of 3 has no trajectory and 0 failed rollouts",
        "group 2 of 3 has no trajectory and 1 failed rollouts; the last of them: KeyError: 'tool'",
    ]


async def test_train_sft(server: FakeArtServer, backend: Backend) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = await backend.train_sft(Named(), [Trajectory(messages_and_choices=items)])
    assert result.step == 1
    assert next(b for _, p, b in server.requests if p.endswith("/train_sft"))["trajectories"][0]["histories"] == [
        {"items": items}
    ]


async def test_a_rollout_recorded_by_url(server: FakeArtServer, backend: Backend) -> None:
    recorded = choice(exchange_id="e1").model_dump()
    server.histories = [
        {"messages_and_choices": [{"role": "user", "content": "short"}], "tools": None},
        {
            "messages_and_choices": [{"role": "user", "content": "a"}, recorded, {"choice": recorded}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ]
    trajectory = await backend.get_rollout("r1")
    assert server.requests[-1][:2] == ("GET", "/api/rollouts/r1")
    assert [type(item) for item in trajectory.messages_and_choices] == [dict, Choice, Choice]
    assert trajectory.tools is not None
    assert len(trajectory.additional_histories) == 1
    server.histories = []
    assert (await backend.get_rollout("r1")).messages_and_choices == []


async def test_a_backend_without_a_server() -> None:
    with pytest.raises(ConfigError, match="no server"):
        await Backend().register(Named())
    backend = Backend("http://localhost:1", "k")
    assert (await backend._connection()).base_url == "http://localhost:1"
    await backend.close()


# --- settings of older code ---


async def test_backend_train_passes_settings_on(server: FakeArtServer, backend: Backend) -> None:
    await backend.train(Named(), [a_group(0, 1)], learning_rate=3e-4, loss="cispo", kl_penalty_coef=0.0)
    body = next(body for _, path, body in server.requests if path.endswith("/train"))
    assert body["config"]["learning_rate"] == 3e-4
    assert body["config"]["loss"]["type"] == "cispo"
    with pytest.raises(ConfigError, match="kimi_k2_tau"):
        await backend.train(Named(), [a_group(0, 1)], kimi_k2_tau=0.1)


def test_internal_config_becomes_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings = settings_from_internal_config(
            {
                "init_args": {"max_seq_length": 4096, "gpu_memory_utilization": 0.7, "load_in_4bit": True},
                "engine_args": {"enforce_eager": True, "max_num_seqs": 8, "max_model_len": 4096},
                "peft_args": {
                    "r": 8,
                    "lora_alpha": 16,
                    "use_rslora": True,
                    "target_modules": ["q_proj"],
                    "lora_dropout": 0.0,
                },
                "chat_template_kwargs": {"enable_thinking": False},
                "rollout_weights_mode": "lora",
            }
        )
    assert settings.engine.max_context == 4096
    assert settings.engine.max_running == 8
    assert (settings.lora.rank, settings.lora.target_modules) == (8, ["q_proj"])
    assert settings.lora.scale == pytest.approx(16 / 8**0.5)
    assert settings.render.chat_template_kwargs == {"enable_thinking": False}
    assert settings.trainer.quantization == "nf4"
    assert len(caplog.records) == 1
    for hint in ("init_args.gpu_memory_utilization", "engine_args.enforce_eager"):
        assert hint in caplog.records[0].message


def test_the_optimizer_of_older_code() -> None:
    given = {"trainer_args": {"max_grad_norm": 0.1, "weight_decay": 0.1, "adam_beta2": 0.99, "report_to": "none"}}
    assert optimizer_from_internal_config(given) == OptimizerConfig(
        max_grad_norm=0.1, weight_decay=0.1, betas=(0.9, 0.99)
    )
    assert settings_from_internal_config(given) == ModelSettings()
    assert optimizer_from_internal_config(None) is optimizer_from_internal_config({"peft_args": {"r": 4}}) is None
    with pytest.raises(ConfigError, match=r"`trainer_args\.max_grad_norm` must be greater than 0, got 0"):
        optimizer_from_internal_config({"trainer_args": {"max_grad_norm": 0}})


async def test_a_step_takes_the_optimizer_of_its_model_unless_it_names_one(
    server: FakeArtServer, backend: Backend
) -> None:
    for settings in ({}, {"optimizer": OptimizerConfig(max_grad_norm=2.0)}):
        await backend.train(Clipped(), [a_group(0, 1)], **settings)
    trajectory = Trajectory(
        messages_and_choices=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    await backend.train_sft(Clipped(), [trajectory])
    bodies = [body for _, path, body in server.requests if path.endswith(("/train", "/train_sft"))]
    assert [body["config"]["optimizer"]["max_grad_norm"] for body in bodies] == [0.1, 2.0, 0.1]


async def test_training_without_logprobs_is_an_older_word(backend: Backend) -> None:
    await backend.train(Named(), [a_group(0, 1)], allow_training_without_logprobs=True)


async def test_an_error_of_the_server_speaks_the_users_words(server: FakeArtServer, backend: Backend) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        return refusal(400, "invalid_config", "`engine.max_context` is 9000, but the model is made for 4096")

    for config, name in [
        ({"init_args": {"max_seq_length": 9000}}, "`init_args.max_seq_length` is 9000"),
        ({"engine_args": {"max_model_len": 9000}}, "`engine_args.max_model_len` is 9000"),
    ]:
        server.trouble = [refuse]
        model = TrainableModel(name="m", project="p", base_model="b", _internal_config=config)
        with pytest.raises(ConfigError, match=name):
            await model.register(backend)


def test_internal_config_nothing_and_direct() -> None:
    assert settings_from_internal_config(None) == ModelSettings()
    settings = ModelSettings.model_validate({"lora": {"rank": 4}})
    assert settings_from_internal_config({"settings": settings}) == settings
    with pytest.raises(ConfigError, match="excludes all other keys"):
        settings_from_internal_config({"settings": settings, "init_args": {}})
    assert settings_from_internal_config({"peft_args": {"target_modules": "all-linear"}}) == ModelSettings()
    whole = {"load_in_4bit": False, "load_in_8bit": False}
    assert settings_from_internal_config({"init_args": whole}) == ModelSettings()
    full = {"init_args": {"full_finetuning": True}, "peft_args": {"use_gradient_checkpointing": True}}
    settings = settings_from_internal_config(full)
    assert (settings.lora, settings.trainer.gradient_checkpointing) == (None, True)
    merged = {"rollout_weights_mode": "merged", "init_args": {"load_in_4bit": False, "max_seq_length": 512}}
    assert settings_from_internal_config(merged).engine == VllmConfig(weights="merged", max_context=512)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, "engine_args.kv_cache_dtype"),
        ({"peft_args": {"lora_dropout": 0.1}}, "peft_args.lora_dropout"),
        ({"trainer_args": {"optim": "adamw_8bit"}}, "trainer_args.optim"),
        ({"rollout_weights_mode": "mixed"}, "'lora' or 'merged'"),
        ({"rollout_weights_mode": "merged", "init_args": {"load_in_4bit": True}}, "init_args.load_in_4bit"),
        ({"chat_template": "x"}, "chat_template"),
        ({"trainer_gpu_ids": [0], "inference_gpu_ids": [1]}, "trainer_gpu_ids"),
        ({"peft_args": {"r": 0}}, r"`peft_args\.r` must be greater than or equal to 1, got 0"),
        ({"init_args": {"max_seq_length": -1}}, r"`init_args\.max_seq_length` must be greater than .*, got -1"),
        ({"engine_args": {"max_num_seqs": "many"}}, "engine_args.max_num_seqs='many' is not of type int"),
        ({"init_args": {"load_in_4bit": True, "load_in_8bit": True}}, "init_args.load_in_8bit"),
        ({"init_args": {"full_finetuning": True, "load_in_4bit": True}}, "needs whole weights"),
        (
            {"init_args": {"full_finetuning": True}, "peft_args": {"r": 8}},
            r"trains all weights, so peft_args\.r of a LoRA",
        ),
        (
            {"init_args": {"max_seq_length": 10_000}, "engine_args": {"max_model_len": 4096}},
            r"engine_args\.max_model_len=4096 contradicts init_args\.max_seq_length=10000",
        ),
    ],
)
def test_internal_config_that_cannot_be_honoured(config: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        settings_from_internal_config(config)
