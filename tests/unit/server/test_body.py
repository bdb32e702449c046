"""Bodies are refused by size, number of values and compression before anything is built from them."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from art.config import LimitsConfig, ServerConfig
from art.errors import InvalidRequestError, PayloadTooLargeError
from art.gateway.workers import Workers
from art.protocol.training import TrainRequest, validate_training
from art.server import body as body_module
from art.server.app import App
from art.server.body import BodyLimits, read_json
from tests.support.app import KEY, GatewayOnly
from tests.support.gateway import Bench, open_bench

CHAT = "/v1/chat/completions"
SMALL = {"model": "games/agent", "messages": [{"role": "user", "content": "hi"}]}


def request(receive: Any, *, gzip: bool = False) -> Request:
    return Request({"type": "http", "headers": [(b"content-encoding", b"gzip")] if gzip else []}, receive)


@pytest.fixture
async def bench(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path, tokenizer_dir) as bench:
        bench.answers(*["yes"] * 9)
        yield bench


def http(bench: Bench, **settings: Any) -> httpx2.AsyncClient:
    app = App(GatewayOnly(bench), api_key=KEY, config=ServerConfig(**settings))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test", headers=headers)


def message(response: httpx2.Response) -> str:
    return str(response.json()["error"]["message"])


async def test_training_data_may_be_larger_than_chats(bench: Bench) -> None:
    async with http(bench, max_chat_body_bytes=2048, max_body_bytes=20_000) as client:
        text = "x" * 4000
        large = json.dumps({**SMALL, "messages": [{"role": "user", "content": text}]})
        refused = await client.post(CHAT, content=large)
        assert refused.status_code == 413
        assert "`max_chat_body_bytes`" in message(refused)
        train = "/api/models/games/agent/train"
        job = {"job_id": "job-0001", "groups": [{"trajectories": [{"histories": [], "unknown": text}]}]}
        taken = await client.post(train, content=json.dumps(job))
        assert taken.status_code == 400
        assert "unknown" in message(taken)
        refused = await client.post(train, content=json.dumps({**job, "job_id": text * 6}))
        assert refused.status_code == 413
        assert "`max_body_bytes`" in message(refused)


async def test_an_error_does_not_send_back_what_came(bench: Bench) -> None:
    async with http(bench) as client:
        refused = await client.post(CHAT, json={**SMALL, "x" * 2**21 + "y": 1})
        assert refused.status_code == 400
        assert len(refused.content) < 20_000
        assert "characters left out" in message(refused)
        assert len(refused.json()["error"]["param"]) < 300


async def test_many_values_are_refused(bench: Bench) -> None:
    async with http(bench, limits=LimitsConfig(max_json_values=1000, max_training_json_values=5000)) as client:
        lists = b'{"model": "games/agent", "messages": [%b[]]}'
        refused = await client.post(CHAT, content=lists % (b"[]," * 2000))
        assert refused.status_code == 400
        assert "more than 1000 values" in message(refused)
        in_a_text = {**SMALL, "messages": [{"role": "user", "content": "[]," * 500}]}
        assert (await client.post(CHAT, json=in_a_text)).status_code == 200
        train = "/api/models/games/agent/train"
        job = b'{"job_id": "job-0001", "groups": [%b[]]}'
        assert "groups" in message(await client.post(train, content=job % (b"[]," * 2000)))
        assert "more than 5000 values" in message(await client.post(train, content=job % (b"[]," * 5000)))


async def test_a_refusal_does_not_wait_for_the_rest_of_the_body() -> None:
    limits = BodyLimits.of(ServerConfig(), training_data=True)
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"[]," * 20_000, "more_body": num_read < 1000}

    with pytest.raises(InvalidRequestError, match="2000000 values"):
        await read_json(request(receive), limits, Workers(), lambda value: value)
    assert num_read < 60


# -- compression -------------------------------------------------------------------------------------------------------


async def test_gzip(bench: Bench) -> None:
    async with http(bench) as client:
        packed = gzip.compress(json.dumps(SMALL).encode())
        headers = {"content-encoding": "gzip"}
        assert (await client.post(CHAT, content=packed, headers=headers)).status_code == 200
        cut = await client.post(CHAT, content=packed[:-9], headers=headers)
        assert (cut.status_code, "its end is missing" in message(cut)) == (400, True)
        longer = await client.post(CHAT, content=packed + packed, headers=headers)
        assert (longer.status_code, "after the end" in message(longer)) == (400, True)
        plain = await client.post(CHAT, content=json.dumps(SMALL), headers=headers)
        assert (plain.status_code, "not valid gzip" in message(plain)) == (400, True)
        other = await client.post(CHAT, content=packed, headers={"content-encoding": "br"})
        assert (other.status_code, "'br'" in message(other)) == (415, True)
        assert other.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("training_data", [False, True])
async def test_what_a_gzip_holds_is_bounded(monkeypatch: pytest.MonkeyPatch, training_data: bool) -> None:
    """A bomb is refused once it is larger than `_FREE_BYTES` and a hundred times what came."""
    limits = BodyLimits.of(ServerConfig(), training_data=training_data)
    num_plain = 0

    class Counting(body_module.JsonBounds):
        def feed(self, piece: bytes | bytearray | memoryview) -> None:
            nonlocal num_plain
            num_plain += len(piece)
            super().feed(piece)

    monkeypatch.setattr(body_module, "JsonBounds", Counting)
    bomb = gzip.compress(b" " * (60 * 2**20))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bomb}

    with pytest.raises(PayloadTooLargeError):
        await read_json(request(receive, gzip=True), limits, Workers(), lambda value: value)
    assert num_plain < 100 * len(bomb)
    assert num_plain <= limits.max_bytes


async def test_every_byte_of_a_gzip_arrives() -> None:
    """Also where the output of a step is full exactly when its input ends."""
    limits = BodyLimits.of(ServerConfig(), training_data=True)
    for size in (0, 1, 2**18 - 2, 2**18 - 1, 2**18, 2**18 + 1, 2**19 - 2, 900_000):
        packer = zlib.compressobj(wbits=31)
        packed = packer.compress(b'"' + b"a" * size + b'"') + packer.flush()
        parts = [packed[i : i + 97] for i in range(0, len(packed), 97)]

        async def receive(parts: list[bytes] = parts) -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": len(parts) > 0}

        assert await read_json(request(receive, gzip=True), limits, Workers(), lambda value: value) == "a" * size


# -- one body beside others --------------------------------------------------------------------------------------------

MIB = 2**20
STALL_S = 0.25


async def ask(body: bytes) -> float:
    """The largest CPU time that this process used between two turns of the event loop, while it read a wrong body."""
    limits = BodyLimits.of(ServerConfig(), training_data=True)
    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    longest_s, at_s = 0.0, time.process_time()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": len(parts) > 0}

    reading = asyncio.create_task(
        read_json(request(receive), limits, Workers(), lambda body: validate_training(TrainRequest, body))
    )
    while not reading.done():
        await asyncio.sleep(0.001)
        longest_s, at_s = max(longest_s, time.process_time() - at_s), time.process_time()
    with pytest.raises((ValidationError, InvalidRequestError)):
        await reading
    return longest_s


@pytest.mark.parametrize(
    "make",
    [
        lambda size: b'{"groups": "%b"}' % ("\u20ac".encode() * (size // 3)),
        lambda size: b'{"groups": "%b"}' % (b"x" * size),
        lambda size: b'{"job_id":%b"x"}' % (b" " * size),
        lambda size: b'{"groups": 0.%b}' % (b"1" * size),
        lambda size: b'{"groups": %b}' % (b"1" * size),
        lambda size: b'{"%b": 1}' % (b"x" * size),
    ],
    ids=["a long text", "ASCII", "blanks", "a float", "an integer", "a name"],
)
async def test_one_body_does_not_hold_the_others_up(make: Any) -> None:
    assert await ask(make(60 * MIB)) < STALL_S


def test_a_text_in_the_place_of_groups_is_not_taken_apart() -> None:
    body = {"job_id": "job-00001", "groups": "\u20ac" * (2 * MIB), "sft": "x" * MIB}
    tracemalloc.start()
    with pytest.raises(ValidationError):
        validate_training(TrainRequest, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MIB
