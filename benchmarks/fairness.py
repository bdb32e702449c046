"""One key floods a server; how long does a chat of another key wait?

A real server with the embedded engine and the tiny model. A chat of 4 tokens is asked for again and again by the key of
one project, first alone, then while the key of another project has hundreds of requests under way: short answers, long
answers, long prompts, or a burst of thousands at once. With `--one-project` both keys belong to one project.

    python -m benchmarks fairness --json fairness.json
    python -m benchmarks fairness --flood 200 --chats 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import multiprocessing.synchronize
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from benchmarks.kill_storm import tiny_model
from benchmarks.load_client import REQUEST_DEADLINE_S, Connection
from benchmarks.report import Cell, Result
from benchmarks.serve_load import server

NAME = "agent"
GREEDY, OTHER = "greedy", "other"
CHAT_TOKENS = 4
LONGEST_PART_S = 40.0
SETTLE_S = 3.0
"""Time between the start of a flood and the first chat beside it."""
HOT = 2.0
"""A temperature at which the tiny model hardly ever ends an answer by itself."""


@dataclass(frozen=True, slots=True)
class Flood:
    """What the greedy key sends."""

    name: str
    at_once: int
    max_tokens: int
    prompt_words: int = 4
    is_burst: bool = False
    """Whether each connection sends one request only."""


def floods(at_once: int) -> list[Flood]:
    return [
        Flood(f"{at_once} at once, answers of 16 tokens", at_once, 16),
        Flood(f"{at_once} at once, answers of 256 tokens", at_once, 256),
        Flood(f"{at_once} at once, prompts of 180 words", at_once, 16, prompt_words=180),
        Flood(f"{5 * at_once} sent in one moment, answers of 16 tokens", 5 * at_once, 16, is_burst=True),
    ]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--flood", type=int, help="requests of the greedy key at once (default: 400, with --quick 40)")
    group.add_argument("--chats", type=int, help="chats of the other key in each part (default: 60, with --quick 5)")
    group.add_argument("--one-project", action="store_true", help="give both keys the same project")


def run(args: argparse.Namespace) -> Result:
    at_once, num_chats = args.flood or (40 if args.quick else 400), args.chats or (5 if args.quick else 60)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        rows = asyncio.run(measure(Path(name) / "data", model, floods(at_once), num_chats, args.one_project))
    return Result(
        summary=f"A chat of {CHAT_TOKENS} tokens, alone and while another key "
        f"{'of the same project' if args.one_project else 'of another project'} floods the server.",
        rows=rows,
        notes=[
            "times of the other key's chat in ms, from its request to the end of its answer",
            "beside a burst, chats are asked for until its last request is answered, so their number differs",
            f"a chat without an answer for {REQUEST_DEADLINE_S:.0f} s counts as that long",
            "client, server and engine share the machine",
        ],
        clock="wall",
    )


async def measure(
    data_dir: Path, model: Path, kinds: list[Flood], num_chats: int, one_project: bool
) -> list[dict[str, Cell]]:
    greedy, other = (OTHER if one_project else GREEDY), OTHER
    rows: list[dict[str, Cell]] = []
    async with server(data_dir) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        for project in {greedy, other}:
            await art.TrainableModel(name=NAME, project=project, base_model=str(model)).register(backend)
        target = Target(one.host, one.port, make_key(data_dir, greedy), f"{greedy}/{NAME}")
        connection = Connection(one.host, one.port, make_key(data_dir, other))
        await chats(connection, other, num_chats)  # warms up
        for kind in kinds:
            alone = await chats(connection, other, num_chats)
            async with flooding(target, kind) as is_over:
                beside = await chats(connection, other, num_chats, is_over if kind.is_burst else None)
            rows.append(_row(kind, alone, beside))
            print(rows[-1], file=sys.stderr, flush=True)
        connection.close()
    return rows


def make_key(data_dir: Path, project: str) -> str:
    command = [sys.executable, "-m", "art.cli.main", "keys", "create", "--data-dir", str(data_dir), "--name", project]
    command += ["--project", project, "--scope", "infer"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def chats(
    connection: Connection, project: str, count: int, is_over: multiprocessing.synchronize.Event | None = None
) -> list[float]:
    """Times of `count` chats one after the other, in seconds; with `is_over` of as many as are asked for before it.

    No more are asked for once they have taken `LONGEST_PART_S`.
    """
    times: list[float] = []
    for number in itertools.count():
        if (is_over.is_set() if is_over is not None else number >= count) or sum(times) > LONGEST_PART_S:
            break
        messages = [{"role": "user", "content": f"say yes, no or maybe {number}"}]
        body = {"model": f"{project}/{NAME}", "messages": messages, "max_tokens": CHAT_TOKENS, "temperature": HOT}
        try:
            answer = await connection.request("/v1/chat/completions", body)
        except TimeoutError:
            connection.close()
            times.append(REQUEST_DEADLINE_S)
            continue
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")
        times.append(answer.whole_s)
        await asyncio.sleep(0.02)
    return times


def _row(kind: Flood, alone: list[float], beside: list[float]) -> dict[str, Cell]:
    alone_p95, beside_p95 = _p95(alone), _p95(beside)
    return {
        "flood": kind.name,
        "alone, median": sorted(alone)[len(alone) // 2] * 1000,
        "alone, p95": alone_p95 * 1000,
        "beside, median": sorted(beside)[len(beside) // 2] * 1000,
        "beside, p95": beside_p95 * 1000,
        "longest": max(beside) * 1000,
        "p95 beside / alone": beside_p95 / alone_p95,
    }


def _p95(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.95))]


# -- the greedy key, in a process of its own ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    api_key: str
    model: str


@contextlib.asynccontextmanager
async def flooding(target: Target, kind: Flood) -> AsyncIterator[multiprocessing.synchronize.Event]:
    """Keep a flood going during the body. The event is set when a burst has been answered."""
    context = multiprocessing.get_context("spawn")
    started, is_over = context.Event(), context.Event()
    process = context.Process(target=_flood, args=(target, kind, started, is_over), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(started.wait)
        if not kind.is_burst:
            await asyncio.sleep(SETTLE_S)
        yield is_over
        if process.exitcode:
            raise RuntimeError(f"the flood of {kind.name} ended early")
    finally:
        process.kill()
        process.join()
        await asyncio.sleep(SETTLE_S)  # what is left of it is cancelled


def _flood(
    target: Target, kind: Flood, started: multiprocessing.synchronize.Event, is_over: multiprocessing.synchronize.Event
) -> None:
    asyncio.run(_send(target, kind, started))
    is_over.set()


async def _send(target: Target, kind: Flood, started: multiprocessing.synchronize.Event) -> None:
    numbers = itertools.count()

    async def ask() -> None:
        connection = Connection(target.host, target.port, target.api_key)
        while True:
            words = " ".join(f"yes {next(numbers)}" for _ in range(kind.prompt_words // 2))
            body: dict[str, Any] = {
                "model": target.model, "messages": [{"role": "user", "content": words}],
                "max_tokens": kind.max_tokens, "temperature": HOT,
            }  # fmt: skip
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                answer = await connection.request("/v1/chat/completions", body)
                if answer.status == 400:
                    raise RuntimeError(f"the flood is refused: {answer.body[:200]!r}")
            if kind.is_burst:
                connection.close()
                return

    started.set()
    await asyncio.gather(*(ask() for _ in range(kind.at_once)))
