"""CPU time that one chat request costs in the server process, beside the engine.

A server with an engine that answers at once runs in its own process; clients here play multi-turn conversations
against it over plain sockets. Reported is the CPU time of the server process per request: what a request adds to
a training step however many cores there are. There is no second contender, so these figures move with the machine.

    python -m benchmarks gateway_overhead --conversations 640 --turns 4 --concurrency 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Spread

KEY = "benchmark"
ANSWER = "I take the centre: b2."
BOARD = "   a b c\n1  . x .\n2  o . .\n3  . . x\nYour move."


class InstantEngine:
    """Answers with the same tokens at once."""

    def __init__(self, token_ids: list[int]) -> None:
        from art.engine import TokenChunk

        logprobs = [-0.5] * len(token_ids)
        self._whole = TokenChunk(token_ids=token_ids, logprobs=logprobs, finish_reason="stop")
        self._parts = [
            TokenChunk(token_ids=[token], logprobs=[-0.5], finish_reason=None if i < len(token_ids) - 1 else "stop")
            for i, token in enumerate(token_ids)
        ]

    async def generate(self, request: Any, *, stream: bool) -> AsyncGenerator[Any, None]:
        for chunk in self._parts if stream else [self._whole]:
            yield chunk


def serve(sock: socket.socket, model: str, answer: str, pipe: Connection, profile: str | None) -> None:
    import uvicorn

    from art.gateway.chat import Gateway
    from art.gateway.policies import PolicyRef
    from art.gateway.recorder import Recorder
    from art.gateway.render import load_renderer
    from art.server.app import create_app
    from art.storage.database import Database

    class Runtime:
        def __init__(self, directory: str) -> None:
            renderer = load_renderer(model)
            tokens = renderer.tokenizer.encode(answer, add_special_tokens=False) + [renderer.stop_token_ids[0]]
            self.renderer = type(renderer).__name__
            self.database = Database(Path(directory) / "art.db")
            self.recorder = Recorder(self.database)
            self.gateway = Gateway(self, self.recorder)
            self.policy = PolicyRef(
                project="p", name="m", policy_version=0, engine=InstantEngine(tokens), adapter="p/m@0",
                renderer=renderer, max_context=32768,
            )  # fmt: skip

        def resolve_ready(self, model: str) -> PolicyRef:
            return self.policy

        async def health(self) -> dict[str, Any]:
            return {"cpu_s": time.process_time(), "renderer": self.renderer}

    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            runtime = Runtime(directory)
            await runtime.recorder.start()
            app = create_app(runtime, api_key=KEY, max_body_bytes=1 << 24)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
            task = asyncio.create_task(server.serve(sockets=[sock]))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            server.should_exit = True
            await task
            runtime.database.close()

    run = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(run, main())
        profiler.dump_stats(profile)
    else:
        run(main())


class Client:
    """One keep-alive connection; as little work as possible."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {path} HTTP/1.1",
            "host: x",
            f"authorization: Bearer {KEY}",
            f"content-length: {len(content)}",
        ]
        self._writer.write("\r\n".join([*head, "", ""]).encode() + content)
        header = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in header.split(b"\r\n")[0], header + await self._reader.read(2000)
        if b"transfer-encoding: chunked" in header:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        size = int(header.split(b"content-length:")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(size)

    def close(self) -> None:
        self._writer.close()


async def play(client: Client, args: argparse.Namespace, answer: str, latencies: list[float]) -> None:
    messages = [{"role": "system", "content": f"You play x. Game {random.random()}."}]
    for _ in range(args.turns):
        messages.append({"role": "user", "content": BOARD})
        started = time.perf_counter()
        await client.call("POST", "/v1/chat/completions", {"model": "p/m", "messages": messages, "stream": args.stream})
        latencies.append(time.perf_counter() - started)
        messages.append({"role": "assistant", "content": answer})


async def measure(address: tuple[str, int], args: argparse.Namespace, answer: str) -> list[dict[str, Any]]:
    """One dict of figures per repetition."""
    clients = [Client(address) for _ in range(args.concurrency)]
    for client in clients:
        await client.open()
    latencies: list[float] = []

    async def worker(client: Client, count: int) -> None:
        for _ in range(count):
            await play(client, args, answer, latencies)

    await asyncio.gather(*(worker(client, 1) for client in clients))  # warm up
    figures = []
    for _ in range(args.repeats):
        latencies.clear()
        before = json.loads(await clients[0].call("GET", "/health"))
        started = time.perf_counter()
        await asyncio.gather(*(worker(client, max(1, args.conversations // args.concurrency)) for client in clients))
        wall_s = time.perf_counter() - started
        after = json.loads(await clients[0].call("GET", "/health"))
        figures.append(summarise(sorted(latencies), after["cpu_s"] - before["cpu_s"], wall_s, after["renderer"]))
    for client in clients:
        client.close()
    return figures


def summarise(latencies: list[float], cpu_s: float, wall_s: float, renderer: str) -> dict[str, Any]:
    count = len(latencies)
    return {
        "renderer": renderer,
        "requests": count,
        "server CPU ms per request": cpu_s / count * 1e3,
        "requests/s": count / wall_s,
        "latency ms, median": latencies[count // 2] * 1e3,
        "latency ms, 99 %": latencies[int(count * 0.99)] * 1e3,
    }


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="directory or hub id with tokenizer and chat template (default: a tiny one)")
    group.add_argument("--conversations", type=int, default=640)
    group.add_argument("--turns", type=int, default=4)
    group.add_argument("--concurrency", type=int, default=64)
    group.add_argument("--stream", action="store_true")
    group.add_argument("--profile", help="write a cProfile file of the server process")


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            model = directory
            maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(directory,))
            maker.start()
            maker.join()
        figures = run_server(model, args)
    first = figures[0]
    row = {
        name: Spread.of([one[name] for one in figures]) if isinstance(value, float) else value
        for name, value in first.items()
    }
    streamed = "streamed" if args.stream else "plain"
    return Result(
        summary=f"{args.concurrency} conversations of {args.turns} turns at once, {streamed} answers, instant engine.",
        rows=[row],
    )


def make_model(directory: str) -> None:
    """The tiny model's tokenizer and template; in a process of its own, since this loads transformers."""
    from art.testing.tiny.tokenizer import train_tokenizer

    train_tokenizer([BOARD, ANSWER] * 50, vocab_size=400, max_length=4096).save_pretrained(directory)
    (Path(directory) / "config.json").write_text('{"model_type": "qwen3"}')


def run_server(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(sock, model, ANSWER, theirs, args.profile))
    process.start()
    ours.recv()
    try:
        return asyncio.run(measure(sock.getsockname()[:2], args, ANSWER))
    finally:
        ours.send("stop")
        process.join(10)
