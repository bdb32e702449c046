"""The engine process of vLLM, called over its frames. It connects to a fake server that already runs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from art.config import VllmConfig
from art.engine import GenerateRequest
from art.errors import ConfigError, InvalidRequestError, NotFoundError, ProcessError
from art.protocol.calls import Info, StartVllm
from art.protocol.rpc import RpcClient
from art.runtime.hosting.process_engine import ProcessEngine
from tests.support.calls import raw
from tests.support.fake_vllm import CONTEXT, VOCAB, FakeVllm

QUICK = """
from art.worker import child, vllm_child

child.HEARTBEAT_S, vllm_child.WATCH_S = 0.1, 0.2
vllm_child.main()
"""
"""The process, with less time between two heartbeats, and between two looks at the server."""


@asynccontextmanager
async def child() -> AsyncIterator[tuple[RpcClient, list[dict[str, Any]]]]:
    """A connection to a new process, and the list of its heartbeats."""
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", QUICK, "--fd", str(theirs.fileno())),
        pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    theirs.close()
    heartbeats: list[dict[str, Any]] = []
    client = await RpcClient(heartbeats.append).connect(ours)
    try:
        yield client, heartbeats
    finally:
        await client.close()
        await asyncio.wait_for(process.wait(), 10)  # it leaves when its connection ends


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return tmp_path


async def start(client: RpcClient, model: Path, *urls: str) -> ProcessEngine:
    await client.call(StartVllm(model=str(model), config=VllmConfig(urls=urls), lora_rank=4))

    async def connect() -> RpcClient:
        return client

    return ProcessEngine(connect, attempts=4)


def ask(**fields: Any) -> GenerateRequest:
    defaults = {"request_id": "r", "adapter": None, "prompt_token_ids": [7], "max_tokens": 30, "stop_token_ids": (10,)}
    return GenerateRequest(**{**defaults, "seed": 1, **fields})


async def test_calls_reach_the_server_and_answers_come_back(model: Path) -> None:
    fake = FakeVllm()
    async with fake.serve() as url, child() as (client, heartbeats):
        with pytest.raises(ProcessError, match="call `start_vllm` first"):
            await client.call(Info())
        with pytest.raises(ConfigError, match="is not a local folder"):
            await start(client, model / "no" / "model", url)
        engine = await start(client, model, url)
        assert (await engine.info()).max_context == CONTEXT - 1
        for stream in (False, True):
            chunks = [chunk async for chunk in engine.generate(ask(), stream=stream)]
            assert [token for chunk in chunks for token in chunk.token_ids] == [8, 9, 10]
            assert chunks[-1].finish_reason == "stop"
        assert await engine.score([1, 2, 3], None) == [-1.0, -1.0]
        assert (await engine.stats())["generated_tokens"] == 12.0
        with pytest.raises(NotFoundError, match="m@1"):
            await engine.score([1, 2], "m@1")
        await engine.unload_adapter("m@1")
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            [chunk async for chunk in engine.generate(ask(max_tokens=0), stream=False)]
        with pytest.raises(InvalidRequestError, match="unknown method 'dance'"):
            await client.call(raw("dance"))
        assert (await engine.info()) == (await engine.info())
        assert asdict(await engine.info())["draws_by_index"] is False
        async with asyncio.timeout(60):
            while heartbeats[-1]["doing"] != "idle":
                await asyncio.sleep(0.05)


async def test_cancelling_a_call_cancels_it_on_the_server(model: Path) -> None:
    fake = FakeVllm()
    async with fake.serve() as url, child() as (client, _):
        engine = await start(client, model, url)
        fake.gate.clear()
        waiting = asyncio.ensure_future(anext(engine.generate(ask(), stream=False)))
        async with asyncio.timeout(60):
            while fake.num_running == 0:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while fake.num_running:
                await asyncio.sleep(0.01)
        fake.gate.set()
        async with aclosing(engine.generate(ask(), stream=True)) as chunks:
            assert (await anext(chunks)).token_ids == [8]


async def test_a_sleeping_server_is_not_mistaken_for_a_stalled_one(model: Path) -> None:
    fake = FakeVllm()
    async with fake.serve() as url, child() as (client, heartbeats):
        engine = await start(client, model, url)
        await engine.sleep()
        held = asyncio.create_task(engine.score([1, 2, 3], None))
        async with asyncio.timeout(60):
            # It says so again and again: then the time since it last did falls from one heartbeat to the next.
            while all(a["since_s"] < b["since_s"] for a, b in pairwise(asleep(heartbeats))):
                await asyncio.sleep(0.05)
        assert not held.done()
        await engine.wake()
        assert await held == [-1.0, -1.0]


def asleep(heartbeats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [beat for beat in heartbeats if beat["doing"] == "asleep"]
