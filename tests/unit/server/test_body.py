"""Bodies are refused by size, number of values and compression before anything is built from them."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from art.config import ServerConfig
from art.errors import InvalidRequestError
from art.gateway.workers import Workers
from art.protocol.training import TrainRequest, validate_training
from art.server.app import App
from art.server.body import read_json
from tests.support.app import KEY, GatewayOnly
from tests.support.gateway import Bench, open_bench

CHAT = "/v1/chat/completions"
SMALL = {"model": "games/agent", "messages": [{"role": "user", "content": "hi"}]}


def request(receive: Any) -> Request:
    return Request({"type": "http", "headers": []}, receive)


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
    async with http(bench, max_body_bytes=20 * 2**20) as client:
        texts = ["x" * 3 * 2**20] * 3
        large = json.dumps({**SMALL, "messages": [{"role": "user", "content": text} for text in texts]})
        refused = await client.post(CHAT, content=large)
        assert refused.status_code == 413
        assert "8388608 bytes" in message(refused)
        train = "/api/models/games/agent/train"
        job = {"job_id": "job-0001", "groups": [{"trajectories": [{"histories": [], "unknown": texts}]}]}
        taken = await client.post(train, content=json.dumps(job))
        assert taken.status_code == 400
        assert "unknown" in message(taken)
        refused = await client.post(train, content=json.dumps({**job, "job_id": texts * 7}))
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
    async with http(bench) as client:
        lists = b'{"model": "games/agent", "messages": [%b[]]}'
        refused = await client.post(CHAT, content=lists % (b"[]," * 200_000))
        assert refused.status_code == 400
        assert "more than 100000 values" in message(refused)
        in_a_text = {**SMALL, "messages": [{"role": "user", "content": "[]," * 200_000}]}
        assert "values" not in message(await client.post(CHAT, json=in_a_text))
        train = "/api/models/games/agent/train"
        job = b'{"job_id": "job-0001", "groups": [%b[]]}'
        assert "groups" in message(await client.post(train, content=job % (b"[]," * 200_000)))
        too_many = await client.post(train, content=job % (b"[]," * 2_000_000))
        assert "more than 2000000 values" in message(too_many)


async def test_a_refusal_does_not_wait_for_the_rest_of_the_body() -> None:
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"[]," * 20_000, "more_body": num_read < 1000}

    with pytest.raises(InvalidRequestError, match="2000000 values"):
        await read_json(request(receive), ServerConfig(), Workers(), lambda value: value, training_data=True)
    assert num_read < 60


async def test_a_compressed_body_is_refused(bench: Bench) -> None:
    async with http(bench) as client:
        refused = await client.post(CHAT, json=SMALL, headers={"content-encoding": "gzip"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "'gzip'" in message(refused)
        assert (await client.post(CHAT, json=SMALL, headers={"content-encoding": "identity"})).status_code == 200


# -- one body beside others --------------------------------------------------------------------------------------------

MIB = 2**20
STALL_S = 0.25


async def ask(body: bytes) -> float:
    """The largest CPU time that this process used between two turns of the event loop, while it read a wrong body."""
    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    longest_s, at_s = 0.0, time.process_time()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": len(parts) > 0}

    reading = asyncio.create_task(
        read_json(
            request(receive),
            ServerConfig(),
            Workers(),
            lambda body: validate_training(TrainRequest, body),
            training_data=True,
        )
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
@pytest.mark.slow
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
