"""CPU time that one chat request costs in the server process, beside the engine.

A server with an engine that answers at once runs in its own process; clients here play multi-turn conversations
against it over plain sockets. Reported is the CPU time of the server process per request: what a request adds to
a training step however many cores there are. There is no second contender, so these figures move with the machine.

    python -m benchmarks gateway_overhead --conversations 640 --turns 4 --concurrency 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.instant_server import API_KEY, serve
from benchmarks.load_client import Answer, Connection
from benchmarks.report import Result, Spread

ANSWER = "I take the centre: b2."
BOARD = "   a b c\n1  . x .\n2  o . .\n3  . . x\nYour move."


async def play(client: Connection, args: argparse.Namespace, answer: str, latencies: dict[int, float]) -> None:
    """`latencies`: seconds by the seed of the request."""
    messages = [{"role": "system", "content": f"You play x. Game {random.random()}."}]
    for _ in range(args.turns):
        messages.append({"role": "user", "content": BOARD})
        seed, started = random.getrandbits(48), time.perf_counter()
        body = {"model": "p/m", "messages": messages, "stream": args.stream, "seed": seed}
        check(await client.request("/v1/chat/completions", body))
        latencies[seed] = time.perf_counter() - started
        messages.append({"role": "assistant", "content": answer})


async def measure(address: tuple[str, int], args: argparse.Namespace, answer: str) -> list[dict[str, Any]]:
    """One dict of figures per repetition."""
    clients = [Connection(*address, API_KEY) for _ in range(args.concurrency)]
    latencies: dict[int, float] = {}

    async def worker(client: Connection, count: int) -> None:
        for _ in range(count):
            await play(client, args, answer, latencies)

    await asyncio.gather(*(worker(client, 1) for client in clients))  # warm up
    conversations = args.conversations or (64 if args.quick else 640)
    figures = []
    for _ in range(args.repeats):
        latencies.clear()
        before = json.loads(check(await clients[0].request("/health")))
        started = time.perf_counter()
        await asyncio.gather(*(worker(client, max(1, conversations // args.concurrency)) for client in clients))
        wall_s = time.perf_counter() - started
        after = json.loads(check(await clients[0].request("/health")))
        figure = summarise(sorted(latencies.values()), after["cpu_s"] - before["cpu_s"], wall_s, after["renderer"])
        added = [latencies[seed] - took_s for seed, took_s in after["engine_took_s"]]
        figures.append(figure | {"added ms, median": statistics.median(added) * 1e3})
    for client in clients:
        client.close()
    return figures


def check(answer: Answer) -> bytes:
    assert answer.status == 200, answer.body[:2000]
    return answer.body


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
    group.add_argument("--conversations", type=int, help="in all (default: 640)")
    group.add_argument("--turns", type=int, default=4)
    group.add_argument("--concurrency", type=int, default=64)
    group.add_argument("--stream", action="store_true")
    group.add_argument("--profile", help="write a cProfile file of the server process")


def run(args: argparse.Namespace) -> Result:
    measured = figures(args)
    row = {
        name: Spread.of([one[name] for one in measured]) if isinstance(value, float) else value
        for name, value in measured[0].items()
        if name != "added ms, median"  # the latency again: the engine takes no time here
    }
    streamed = "streamed" if args.stream else "plain"
    return Result(
        summary=f"{args.concurrency} conversations of {args.turns} turns at once, {streamed} answers, instant engine.",
        rows=[row],
    )


def figures(args: argparse.Namespace, engine_s: float = 0.0) -> list[dict[str, Any]]:
    """One dict of figures per repetition, with an engine that waits for `engine_s` seconds for each answer."""
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            model = directory
            maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(directory,))
            maker.start()
            maker.join()
        return run_server(model, args, engine_s)


def make_model(directory: str) -> None:
    """The tiny model's tokenizer and template; in a process of its own, since this loads transformers."""
    from art.task import Conversation
    from art.testing.tiny_model import make_tokenizer, render

    talk = Conversation(messages=[{"role": "user", "content": BOARD}, {"role": "assistant", "content": ANSWER}])
    make_tokenizer([talk], [render(talk)], vocab_size=400, max_length=4096).save_pretrained(directory)
    (Path(directory) / "config.json").write_text('{"model_type": "qwen3"}')


def run_server(model: str, args: argparse.Namespace, engine_s: float) -> list[dict[str, Any]]:
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(sock, model, ANSWER, theirs, args.profile, engine_s))
    process.start()
    theirs.close()  # so that the end of the server is seen here
    ours.recv()
    try:
        return asyncio.run(measure(sock.getsockname()[:2], args, ANSWER))
    finally:
        ours.send("stop")
        process.join(10)
