"""What clients expect of any HTTP server: HEAD, HTTP/1.0, request ids, CORS, byte order marks, names with slashes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from art.config import ServerConfig
from art.engine import GenerateRequest, TokenChunk
from art.errors import ConfigError, NotFoundError
from art.protocol.training import ModelStatus
from art.server.app import App
from art.server.connections import Connection
from tests.support.app import KEY, AppBench, GatewayOnly
from tests.support.gateway import Bench, open_bench, user

ORIGIN = "https://lab.example"
CONFIG = ServerConfig(cors_origins=(ORIGIN,))
CHAT = {"model": "games/agent", "messages": [user("hi")]}
BASE = "Qwen/Qwen3-0.6B"


class Models:
    def list_all(self) -> list[ModelStatus]:
        return [
            ModelStatus(
                project=project, name="agent", base_model=BASE, step=3, inference_name=f"{project}/agent",
                created_at=1.7e9, serves_base=project == "games", promoted_step=1,
            )
            for project in ("games", "mail")
        ]  # fmt: skip

    def folder(self, project: str, name: str, step: int) -> Path:
        if (project, name) != ("games", "agent") or step > 3:
            raise NotFoundError(f"there is no step {step}")
        return Path()

    def promoted_step(self, project: str, name: str) -> int:
        if project != "games":
            raise NotFoundError("its engine holds one step at a time")
        return 1


class Runtime(GatewayOnly):
    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.models = Models()

    def name_in(self, project: str, model: str) -> str | None:
        if model == BASE or model.partition("@")[0] == "agent":
            return f"{project}/{model}"
        return super().name_in(project, model)

    async def health(self) -> dict[str, Any]:
        return {"status": "ok"}

    async def obstacles(self) -> dict[str, str]:
        return {}


@dataclass
class Server:
    bench: Bench
    port: int
    http: httpx2.AsyncClient


@pytest.fixture
async def server(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Server]:
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        listener = socket.create_server(("127.0.0.1", 0))
        app = App(Runtime(bench), api_key=KEY, config=CONFIG)  # type: ignore[arg-type]
        config = uvicorn.Config(app, log_level="warning", lifespan="off", http=Connection)
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve([listener]))
        port = listener.getsockname()[1]
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, verify=False) as http:
            yield Server(bench, port, http)
        running.should_exit = True
        await task


async def exchange_raw(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Headers and body of an answer, read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


async def test_head_asks_whether_the_server_is_well(server: Server) -> None:
    for path in ("/health", "/ready"):
        head, got = await server.http.head(path), await server.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(got.content))
    assert (await server.http.head("/v1/models")).status_code == 405
    assert (await server.http.post("/health")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("keep_alive", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_for_http_1_0_is_not_chunked(server: Server, keep_alive: bytes) -> None:
    server.bench.answers("hello world")
    body = json.dumps(CHAT | {"stream": True}).encode()
    head, answer = await exchange_raw(
        server.port,
        b"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer %b\r\n%bcontent-length: %d\r\n\r\n%b"
        % (KEY.encode(), keep_alive, len(body), body),
    )
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    lines = answer.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello world"


async def test_an_answer_of_known_length_for_http_1_0(server: Server) -> None:
    head, answer = await exchange_raw(server.port, b"GET /health HTTP/1.0\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head
    assert json.loads(answer) == {"status": "ok"}


async def test_each_answer_has_a_request_id(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    given = await server.http.get("/health", headers={"x-request-id": "job-7:a.b"})
    assert given.headers["x-request-id"] == given.headers["request-id"] == "job-7:a.b"
    for bad in ("a b", "x" * 129, "a;b"):
        made = (await server.http.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
        assert made.startswith("req_")
    assert (await server.http.get("/nothing")).headers["x-request-id"].startswith("req_")
    server.bench.engine.error = RuntimeError("boom")
    with caplog.at_level(logging.ERROR):
        failed = await server.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "job-8"})
    assert failed.status_code == 500
    assert "internal error job-8" in failed.text
    assert "error job-8" in caplog.text
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0)
    async with client:
        server.bench.engine.error = None
        server.bench.answers("a")
        answer = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert answer._request_id.startswith("req_")


async def test_pages_of_a_named_origin(server: Server) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", verify=False) as page:  # without a key
        leave = await page.options("/v1/chat/completions", headers=asked)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == ORIGIN
        assert leave.headers["access-control-allow-headers"] == "x-a"
        refused = await page.options("/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        unknown = await page.get("/v1/models", headers={"origin": ORIGIN})
        assert unknown.status_code == 401  # a page still needs a key, and may read why
        assert unknown.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in (await server.http.get("/v1/models")).headers


@pytest.mark.parametrize("origin", ["*", "lab.example", "https://lab.example/", "https://*.example", "null"])
def test_an_origin_is_named(origin: str) -> None:
    with pytest.raises(ConfigError, match="an origin is scheme, host and port"):
        ServerConfig(cors_origins=(origin,))


def test_no_page_may_ask_by_default() -> None:
    assert ServerConfig().cors_origins == ()


async def test_a_byte_order_mark_before_json(server: Server) -> None:
    server.bench.answers("a")
    body = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
    assert (await server.http.post("/v1/chat/completions", content=body)).status_code == 200


async def test_the_names_of_models(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        cards = [card async for card in client.models.list()]
    assert [card.id for card in cards] == ["games/agent", "mail/agent", "games/agent@promoted", f"games/{BASE}"]
    assert {(card.object, card.created) for card in cards} == {("model", 1_700_000_000)}
    inside = "/projects/games/v1/models"
    assert [card["id"] for card in (await server.http.get(inside)).json()["data"]] == [
        "games/agent",
        "mail/agent",
        "games/agent@promoted",
        BASE,
    ]
    assert (await server.http.get("/projects%2Fgames/v1/models")).status_code == 404


async def test_what_the_server_does_not_do_is_said(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="there is no route POST /v1/embeddings"):
            await client.embeddings.create(model="games/agent", input="hi")
    assert "there is no route" in (await server.http.post("/v1/nothing")).text


async def test_labels_and_values_that_mean_not_used_are_accepted(server: Server) -> None:
    labels = {
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "1h"}, "service_tier": "auto", "store": False, "metadata": {"a": "b"},
    }  # fmt: skip
    harmless = {
        "parallel_tool_calls": True, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "modalities": ["text"], "stop": None, "n": None, "temperature": None,
    }  # fmt: skip
    server.bench.answers("a", "b")
    chat = await server.http.post("/v1/chat/completions", json=CHAT | labels | harmless)
    assert chat.status_code == 200, chat.text
    answer = await server.http.post("/v1/responses", json={"model": "games/agent", "input": "hi"} | labels)
    assert answer.status_code == 200, answer.text


async def test_the_header_for_new_weights_in_flight_is_checked_and_heard(
    app: AppBench, http: httpx2.AsyncClient
) -> None:
    """Where an answer may switch, its tokens are read as they are sampled."""
    bench, sizes = app.bench, list[int]()
    bench.answers("hello world", "hello world")
    sample = bench.engine.generate

    async def generate(request: GenerateRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        async for chunk in sample(request, stream=stream):
            sizes.append(len(chunk.token_ids))
            yield chunk

    bench.engine.generate = generate
    wrong = await http.post("/v1/chat/completions", json=CHAT, headers={"x-art-in-flight": "drop"})
    assert (wrong.status_code, "must be 'finish' or 'switch', got 'drop'" in wrong.text) == (400, True)
    for value in ("finish", "switch"):
        assert (
            await http.post("/v1/chat/completions", json=CHAT, headers={"x-art-in-flight": value})
        ).status_code == 200
    whole, *parts = sizes
    assert len(parts) > 1 == len({whole, sum(parts)})
