"""CPU time that one chat request costs the client: `openai_client()` against aiohttp alone.

A server with an engine that answers at once runs in its own process. Clients in this process take turns to play the
same conversations against it: aiohttp alone (a session, JSON in and out), `openai_client()`, and `openai_client()`
with `ART_STOCK_CLIENT=1`, where every request goes through OpenAI's client. Reported is the CPU time of this process.

    python -m benchmarks client_overhead --in-flight 16,64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from benchmarks.gateway_overhead import BOARD, make_model
from benchmarks.instant_server import API_KEY, serve
from benchmarks.report import Cell, Result, Spread

ANSWER = "b2, I think"
"""Eight tokens of the tiny model's tokenizer, the end of the turn included."""
MESSAGES = [{"role": "system", "content": "You play x."}, {"role": "user", "content": BOARD}]

Ask = Callable[[int], Awaitable[Any]]
"""Sends one request with this seed and reads its answer."""


@contextlib.asynccontextmanager
async def raw(base_url: str) -> AsyncIterator[Ask]:
    import aiohttp

    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def ask(seed: int) -> Any:
            body = json.dumps({"model": "p/m", "messages": MESSAGES, "seed": seed}).encode()
            async with session.post(f"{base_url}/chat/completions", data=body) as response:
                return json.loads(await response.read())["choices"]

        yield ask


@contextlib.asynccontextmanager
async def with_openai(base_url: str, stock: str) -> AsyncIterator[Ask]:
    from art.client.openai_client import STOCK_CLIENT, make_openai_client

    os.environ[STOCK_CLIENT] = stock
    async with make_openai_client(base_url, API_KEY, model="p/m") as client:

        async def ask(seed: int) -> Any:
            answer = await client.chat.completions.create(model="p/m", messages=MESSAGES, seed=seed)  # type: ignore[arg-type]
            return answer.choices

        yield ask


async def measure(base_url: str, in_flight: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU milliseconds per request of each round, by contender."""
    requests = max(in_flight, args.requests or (128 if args.quick else 2048))
    async with contextlib.AsyncExitStack() as stack:
        contenders = {
            "aiohttp alone": await stack.enter_async_context(raw(base_url)),
            "openai_client()": await stack.enter_async_context(with_openai(base_url, "0")),
            "the same, stock": await stack.enter_async_context(with_openai(base_url, "1")),
        }
        took: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(args.repeats + 1):
            for name in list(contenders) if number % 2 else list(contenders)[::-1]:
                cpu_ms = await play(contenders[name], requests, in_flight)
                if number > 0:  # round 0 opens connections
                    took[name].append(cpu_ms)
    return took


async def play(ask: Ask, requests: int, in_flight: int) -> float:
    seeds = iter(range(requests))

    async def worker(seeds: Iterator[int]) -> None:
        for seed in seeds:
            await ask(seed)

    started = time.process_time()
    await asyncio.gather(*(worker(seeds) for _ in range(in_flight)))
    return (time.process_time() - started) / requests * 1e3


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer", help="directory with tokenizer and chat template (default: the tiny model's)")
    group.add_argument("--in-flight", default="16,64", help="requests at once (default: 16,64)")
    group.add_argument("--requests", type=int, help="in each round (default: 2048)")


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        model = args.tokenizer
        if model is None:
            model = directory
            maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(directory,))
            maker.start()
            maker.join()
        with server(model) as base_url:
            rows = [
                row for text in args.in_flight.split(",")
                for row in rows_of(int(text), asyncio.run(measure(base_url, int(text), args)))
            ]  # fmt: skip
    return Result(
        summary="CPU of the client per request: two messages, an answer of 8 tokens, a server with an instant engine.",
        rows=rows,
    )


def rows_of(in_flight: int, took: dict[str, list[float]]) -> Iterator[dict[str, Cell]]:
    base = took["aiohttp alone"]
    for name, times in took.items():
        yield {
            "in flight": in_flight,
            "client": name,
            "ms CPU per request": Spread.of(times),
            "times aiohttp alone": Spread.of([ms / other for ms, other in zip(times, base, strict=True)]),
            "ratio of the medians": statistics.median(times) / statistics.median(base),
        }


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """Start the server with the instant engine, and give its base URL."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(sock, model, ANSWER, theirs, None))
    process.start()
    theirs.close()
    ours.recv()
    host, port = sock.getsockname()[:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        ours.send("stop")
        process.join(10)
