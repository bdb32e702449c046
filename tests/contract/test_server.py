"""The HTTP server as clients see it: a real uvicorn on a free port, the real `openai` client, and raw requests."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from art import errors
from art.config import ServerConfig
from art.engine import TokenChunk
from art.protocol.checkpoint_calls import CheckpointInfo
from art.protocol.training import (
    DeleteCheckpointsRequest,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.answers import STATUS, failure
from art.server.app import App
from tests.support.gateway import LOOK_UP, Bench, open_bench, user

KEY = "secret-key"
LIMIT = 1 << 20


class Runtime:
    """A runtime that remembers what it was asked."""

    def __init__(self, bench: Bench) -> None:
        self.gateway = bench.gateway
        self.registration = self.training = self.checkpoints = self.jobs = self
        self.models = Models(self)
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.model = ModelStatus(project="games", name="agent", base_model="tiny", step=3, inference_name="games/agent")
        self.job = JobStatus(job_id="job-12345", kind="train", project="games", name="agent", state="queued")

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "base_models": [{"base_model": "/home/me/secret-project"}]}

    async def register(self, request: RegisterRequest, check_folder: Any) -> ModelStatus:
        self._called("register", request)
        return self.model

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(step=step, created_at=1.0, size_bytes=9, full=False, newest=step == 3, best=step == 1)
            for step in (0, 3)
        ]

    async def delete(self, project: str, name: str, request: DeleteCheckpointsRequest) -> list[int]:
        self._called("delete_checkpoints", project, name, request.keep_steps)
        return [0]

    async def train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        self._called("train", project, name, request)
        return self.job

    async def train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        self._called("train_sft", project, name, request)
        return self.job

    async def wait(self, job_id: str, timeout_s: float) -> JobStatus:
        self._called("wait", job_id, timeout_s)
        return self.job


class Models:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def list_all(self) -> list[ModelStatus]:
        return [self.runtime.model]

    async def status(self, project: str, name: str) -> ModelStatus:
        self.runtime._called("status", project, name)
        return self.runtime.model


class Server:
    def __init__(self, url: str, bench: Bench, runtime: Runtime, http: httpx2.AsyncClient) -> None:
        self.url = url
        self.bench = bench
        self.runtime = runtime
        self.http = http
        self.openai = self.client("/v1")

    def client(self, path: str, key: str = KEY) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}{path}", api_key=key, max_retries=0, http_client=self.http)


def _http(transport: httpx2.AsyncBaseTransport | None = None, url: str = "http://test") -> httpx2.AsyncClient:
    # `verify=False` spares the slow loading of certificates; there is no TLS here.
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx2.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=20, verify=False)


@pytest.fixture
async def server(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Server]:
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        runtime = Runtime(bench)
        sock = socket.create_server(("127.0.0.1", 0))
        app = App(runtime, api_key=KEY, config=ServerConfig(max_body_bytes=LIMIT))
        uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(uvicorn_server.serve(sockets=[sock]))
        while not uvicorn_server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with _http(url=url) as http:
                yield Server(url, bench, runtime, http)
        finally:
            uvicorn_server.should_exit = True
            await task


@pytest.fixture
async def local(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Server]:
    """The same without a network, for what does not depend on one."""
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        runtime = Runtime(bench)
        app = App(runtime, api_key=KEY, config=ServerConfig(max_body_bytes=64 * LIMIT))
        async with _http(httpx2.ASGITransport(app=app)) as http:
            yield Server("http://test", bench, runtime, http)


# --- chat, by the openai client ---


async def test_openai_client(server: Server) -> None:
    server.bench.answers("hello world")
    completion = await server.openai.chat.completions.create(model="games/agent", messages=[user("hi")], seed=1)
    assert completion.choices[0].message.content == "hello world"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 3
    exchange_id = completion.choices[0].model_dump()["exchange_id"]
    assert server.bench.recorder.get([exchange_id])[0].message["content"] == "hello world"
    assert completion.model_dump()["policy_version"] == 3


async def test_openai_client_tools_and_reasoning(server: Server) -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'
    server.bench.answers(f"<think>\nhm\n</think>\n\n{call}", "found it")
    tools: Any = [LOOK_UP]
    first = await server.openai.chat.completions.create(model="agent", messages=[user("hi")], tools=tools)
    message = first.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"key": "x"}'  # type: ignore[union-attr]
    assert message.model_dump()["reasoning_content"] == "hm"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    messages: Any = [user("hi"), message, result]  # the client's own object goes back as it came
    second = await server.openai.chat.completions.create(model="agent", messages=messages, tools=tools)
    exchanges = server.bench.recorder.get([first.choices[0].exchange_id, second.choices[0].exchange_id])  # type: ignore[attr-defined]
    assert exchanges[1].parent_id == exchanges[0].id


async def test_openai_stream_helper(server: Server) -> None:
    server.bench.answers("hello world")
    async with server.openai.chat.completions.stream(model="games/agent", messages=[user("hi")]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello world"
    assert server.bench.recorder.get([final.choices[0].exchange_id])  # type: ignore[attr-defined]


async def test_rollout_in_the_url(server: Server) -> None:
    server.bench.answers("one", "two")
    client = server.client("/rollouts/r1/v1")
    messages: list[Any] = [user("hi")]
    first = await client.chat.completions.create(model="games/agent", messages=messages)
    messages += [{"role": "assistant", "content": "one"}, user("more")]
    await client.chat.completions.create(model="games/agent", messages=messages)
    answer = (await server.http.get("/api/rollouts/r1")).json()
    items = answer["histories"][0]["messages_and_choices"]
    assert len(answer["histories"]) == 1
    assert [item.get("role", "choice") for item in items] == ["user", "choice", "user", "choice"]
    assert items[1]["exchange_id"] == first.choices[0].exchange_id  # type: ignore[attr-defined]
    assert [item["message"]["content"] for item in items if "message" in item] == ["one", "two"]


async def test_unknown_rollout(local: Server) -> None:
    assert (await local.http.get("/api/rollouts/nobody")).status_code == 404
    bad = await local.http.post("/rollouts/..%20x/v1/chat/completions", json=_chat())
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "rollout_id"


# --- bad input ---


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "games/agent", "messages": [user("hi")], **fields}


async def test_wrong_key(server: Server) -> None:
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"authorization": ""}):
        response = await server.http.post("/v1/chat/completions", json=_chat(), headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text
    with pytest.raises(openai.AuthenticationError):
        await server.client("/v1", key="x").models.list()
    async with httpx2.AsyncClient(verify=False) as plain:
        assert (await plain.get(f"{server.url}/v1/models")).status_code == 401
        assert (await plain.get(f"{server.url}/nothing")).status_code == 401
        assert (await plain.get(f"{server.url}/health")).json() == {"status": "ok"}
    assert "base_models" in (await server.http.get("/health")).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.7"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages.0.weight"),
        ({"model": 5}, "model"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [LOOK_UP]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"min_p": 0.1}, "min_p"),
        ({"tools": [{"type": "web"}]}, "tools.0"),
        ({"parallel_tool_calls": False, "tools": [LOOK_UP]}, "parallel_tool_calls"),
        ({"top_k": 5}, "top_k"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_fields_are_named(local: Server, fields: dict[str, Any], param: str) -> None:
    response = await local.http.post("/v1/chat/completions", json=_chat(**fields))
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert str(error["param"]).split(".")[0] == param.split(".")[0]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_request_error"
    assert local.bench.engine.requests == []


async def test_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="games/nobody"):
        await server.openai.chat.completions.create(model="games/nobody", messages=[user("hi")])


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b'"x"', b'{"model": NaN}', b"\xff\xfe", b"[" * 5000])
async def test_malformed_json(local: Server, body: bytes) -> None:
    response = await local.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_large_bodies_are_refused_unread(server: Server) -> None:
    junk = b"x" * (10 * LIMIT)
    response = await server.http.post("/v1/chat/completions", content=junk)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"

    async def endless() -> AsyncIterator[bytes]:  # chunked: no length is declared
        for _ in range(40):
            yield b"[" + b" " * (LIMIT // 4)

    try:
        response = await server.http.post("/v1/chat/completions", content=endless())
    except (httpx2.WriteError, httpx2.ReadError, httpx2.RemoteProtocolError):
        pass  # the server hung up in the middle of the upload, as it may
    else:
        assert response.status_code == 413
    server.bench.answers("still here")
    assert (await server.http.post("/v1/chat/completions", json=_chat())).status_code == 200


async def test_unknown_routes_and_methods(local: Server) -> None:
    response = await local.http.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    response = await local.http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"]


async def test_overload_says_when_to_come_back(local: Server) -> None:
    local.bench.engine.error = errors.OverloadedError("the queue is full")
    response = await local.http.post("/v1/chat/completions", json=_chat())
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    response = await local.http.post("/v1/chat/completions", json=_chat(stream=True))
    assert response.status_code == 429


async def test_an_unexpected_error_tells_only_an_id(local: Server, caplog: pytest.LogCaptureFixture) -> None:
    local.bench.engine.error = RuntimeError("password=hunter2")
    response = await local.http.post("/v1/chat/completions", json=_chat())
    error = response.json()["error"]
    assert response.status_code == 500
    assert error["type"] == "server_error"
    assert "hunter2" not in response.text
    error_id = error["message"].split()[2].rstrip(";")
    assert error_id in caplog.text
    assert "hunter2" in caplog.text


async def test_an_error_in_mid_stream(server: Server) -> None:
    async def generate(request: Any, *, stream: bool) -> Any:
        yield TokenChunk(token_ids=[1], logprobs=[-1.0])
        raise errors.ProcessError("the engine died")

    server.bench.engine.generate = generate
    stream = await server.openai.chat.completions.create(model="games/agent", messages=[user("hi")], stream=True)
    with pytest.raises(openai.APIError, match="the engine died"):
        async for _ in stream:
            pass


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_the_engine(server: Server, stream: bool) -> None:
    server.bench.answers("hello world hello world")
    server.bench.engine.delay_s = 0.05 if stream else 30
    request = _chat(stream=stream)
    async with _http(url=server.url) as http:
        task = asyncio.create_task(http.post("/v1/chat/completions", json=request))
        while server.bench.engine.num_running == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(60):
        while server.bench.engine.num_running:
            await asyncio.sleep(0.02)
    assert (server.bench.engine.num_running, server.bench.engine.num_cancelled) == (0, 1)


# --- models, training, checkpoints ---


async def test_training_routes(local: Server) -> None:
    http, runtime = local.http, local.runtime
    register = {"project": "games", "name": "agent", "base_model": "tiny"}
    assert (await http.post("/api/models", json=register)).json()["inference_name"] == "games/agent"
    assert (await http.get("/api/models/games/agent")).json()["step"] == 3
    group = {"trajectories": [{"reward": 1.0, "histories": [{"items": [user("hi")]}]}]}
    response = await http.post("/api/models/games/agent/train", json={"job_id": "job-12345", "groups": [group]})
    assert (response.status_code, response.json()["state"]) == (202, "queued")
    sft = {"job_id": "job-12345", "trajectories": group["trajectories"]}
    assert (await http.post("/api/models/games/agent/train_sft", json=sft)).status_code == 202
    assert (await http.get("/api/jobs/job-12345?wait_s=2.5")).json()["job_id"] == "job-12345"
    assert runtime.calls[-1] == ("wait", "job-12345", 2.5)
    assert (await http.get("/api/models/games/agent/checkpoints")).json()["steps"] == [0, 3]
    response = await http.post("/api/models/games/agent/checkpoints/delete", json={"keep_steps": [3]})
    assert response.json() == {"deleted_steps": [0]}
    assert runtime.calls[-1] == ("delete_checkpoints", "games", "agent", [3])
    assert [call[0] for call in runtime.calls] == [
        "register", "status", "train", "train_sft", "wait", "delete_checkpoints"
    ]  # fmt: skip


async def test_a_loss_that_is_code_needs_the_operator_s_consent(local: Server) -> None:
    group = {"trajectories": [{"reward": 1.0, "histories": [{"items": [user("hi")]}]}]}
    for loss in (
        {"type": "custom", "function": "os:system"},
        [{"type": "ppo"}, {"type": "custom", "function": "a.b:c"}],
    ):
        body = {"job_id": "job-12345", "groups": [group], "config": {"loss": loss}}
        response = await local.http.post("/api/models/games/agent/train", json=body)
        assert response.status_code == 403
        assert "--custom-losses" in response.json()["error"]["message"]
    assert local.runtime.calls == []


async def test_training_routes_refuse_bad_bodies(local: Server) -> None:
    response = await local.http.post("/api/models", json={"project": "games", "name": "agent", "rank": 3})
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("base_model", "rank")
    response = await local.http.post("/api/models/games/agent/train", json=[])
    assert response.status_code == 400
    response = await local.http.get("/api/jobs/job-12345?wait_s=-1")
    assert response.json()["error"]["param"] == "wait_s"
    assert local.runtime.calls == []


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_without_file_descriptors_a_client_is_asked_to_repeat_its_request(
    is_wrapped: bool, local: Server
) -> None:
    error: Exception = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if is_wrapped:
        error, cause = errors.StorageError("writing art.db failed: Too many open files"), error
        error.__cause__ = cause
    local.runtime.error = error
    response = await local.http.get("/api/models/games/agent")
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "true")
    assert "too many open files" in response.json()["error"]["message"]


def test_every_error_has_a_status() -> None:
    def leaves(cls: type[errors.ArtError]) -> list[type[errors.ArtError]]:
        return [cls, *(leaf for child in cls.__subclasses__() for leaf in leaves(child))]

    for cls in leaves(errors.ArtError):
        answer = failure(cls("x"))
        assert answer.status_code == next(STATUS[base] for base in cls.__mro__ if base in STATUS)  # type: ignore[index]
        assert json.loads(answer.body)["error"]["code"] == cls.code
