"""One key floods a server; how long does a chat of another key wait?

A real server with the embedded engine and the tiny model. A chat of 4 tokens is asked for again and again by the key of
one project, first alone, then while the key of another project has hundreds of requests under way: short answers, long
answers, long prompts, or a burst of thousands at once. With `--one-project` both keys belong to one project. `--source`
measures the server of another checkout.

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

import psutil

import art
from benchmarks.bystanders import quantile
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
class Waited:
    """What one chat of the other key took."""

    seconds: float
    cpu_s: float
    """CPU time of the server and its children meanwhile."""


@dataclass(frozen=True, slots=True)
class Flood:
    """What the greedy key sends."""

    name: str
    at_once: int
    max_tokens: int
    prompt_tokens: int = 8
    """Length of each prompt, about. No two share a prefix."""
    is_burst: bool = False
    """Whether each connection sends one request only."""


def floods(at_once: int) -> list[Flood]:
    return [
        Flood(f"{at_once} at once, answers of 16 tokens", at_once, 16),
        Flood(f"{at_once} at once, answers of 256 tokens", at_once, 256),
        Flood(f"{at_once} at once, prompts of 3,000 tokens", at_once, 16, prompt_tokens=3_000),
        Flood(f"{at_once // 4} at once, prompts of 30,000 tokens", at_once // 4, 16, prompt_tokens=30_000),
        Flood(f"{5 * at_once} sent in one moment, answers of 16 tokens", 5 * at_once, 16, is_burst=True),
    ]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--flood", type=int, help="requests of the greedy key at once (default: 400, with --quick 40)")
    group.add_argument("--chats", type=int, help="chats of the other key in each part (default: 60, with --quick 5)")
    group.add_argument("--one-project", action="store_true", help="give both keys the same project")
    group.add_argument("--source", type=Path, help="folder `src` of another checkout, whose server is measured")


def run(args: argparse.Namespace) -> Result:
    at_once, num_chats = args.flood or (40 if args.quick else 400), args.chats or (5 if args.quick else 60)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        config = model / "config.json"  # room for the long prompts, which the tiny model reads without sense
        config.write_text(
            config.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 32768')
        )
        rows = asyncio.run(
            measure(Path(name) / "data", model, floods(at_once), num_chats, args.one_project, args.source)
        )
    return Result(
        summary=f"A chat of {CHAT_TOKENS} tokens, alone and while another key "
        f"{'of the same project' if args.one_project else 'of another project'} floods the server.",
        rows=rows,
        notes=[
            "times of the other key's chat in ms, from its request to the end of its answer",
            "CPU: what server and engine use from its request to the end of its answer, in ms",
            "beside a burst, chats are asked for until its last request is answered, so their number differs",
            f"a chat without an answer for {REQUEST_DEADLINE_S:.0f} s counts as that long",
            "client, server and engine share the machine",
        ],
        clock="wall",
    )


async def measure(
    data_dir: Path, model: Path, kinds: list[Flood], num_chats: int, one_project: bool, source: Path | None
) -> list[dict[str, Cell]]:
    greedy, other = (OTHER if one_project else GREEDY), OTHER
    rows: list[dict[str, Cell]] = []
    async with server(data_dir, source) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        for project in {greedy, other}:
            await art.TrainableModel(name=NAME, project=project, base_model=str(model)).register(backend)
        target = Target(one.host, one.port, make_key(data_dir, greedy), f"{greedy}/{NAME}")
        connection = Connection(one.host, one.port, make_key(data_dir, other))
        processes = [one.process, *one.process.children(recursive=True)]
        await chats(connection, other, num_chats, processes)  # warms up
        for kind in kinds:
            alone = await chats(connection, other, num_chats, processes)
            async with flooding(target, kind) as is_over:
                beside = await chats(connection, other, num_chats, processes, is_over if kind.is_burst else None)
            rows.append(_row(kind, alone, beside))
            print(rows[-1], file=sys.stderr, flush=True)
        connection.close()
    return rows


def make_key(data_dir: Path, project: str) -> str:
    command = [sys.executable, "-m", "art.cli.main", "keys", "create", "--data-dir", str(data_dir), "--name", project]
    command += ["--project", project, "--scope", "infer"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def chats(
    connection: Connection,
    project: str,
    count: int,
    processes: list[psutil.Process],
    is_over: multiprocessing.synchronize.Event | None = None,
) -> list[Waited]:
    """Ask for `count` chats one after the other; with `is_over` for as many as are answered before it.

    No more are asked for once they have taken `LONGEST_PART_S`.
    """
    waits: list[Waited] = []
    for number in itertools.count():
        if (is_over.is_set() if is_over is not None else number >= count) or sum(
            one.seconds for one in waits
        ) > LONGEST_PART_S:
            break
        cpu_s = _cpu_s(processes)
        messages = [{"role": "user", "content": f"say yes, no or maybe {number}"}]
        body = {"model": f"{project}/{NAME}", "messages": messages, "max_tokens": CHAT_TOKENS, "temperature": HOT}
        try:
            answer = await connection.request("/v1/chat/completions", body)
        except TimeoutError:
            connection.close()
            waits.append(Waited(REQUEST_DEADLINE_S, _cpu_s(processes) - cpu_s))
            continue
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")
        waits.append(Waited(answer.whole_s, _cpu_s(processes) - cpu_s))
        await asyncio.sleep(0.02)
    return waits


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _row(kind: Flood, alone: list[Waited], beside: list[Waited]) -> dict[str, Cell]:
    times = {name: [one.seconds * 1000 for one in waits] for name, waits in (("alone", alone), ("beside", beside))}
    row: dict[str, Cell] = {"flood": kind.name}
    for name, values in times.items():
        row |= {f"{name}, median": quantile(values, 0.5), f"{name}, p95": quantile(values, 0.95)}
    return row | {
        "longest": max(times["beside"]),
        "median beside / alone": quantile(times["beside"], 0.5) / quantile(times["alone"], 0.5),
        "p95 beside / alone": quantile(times["beside"], 0.95) / quantile(times["alone"], 0.95),
        "CPU alone, mean": sum(one.cpu_s for one in alone) / len(alone) * 1000,
        "CPU beside, mean": sum(one.cpu_s for one in beside) / len(beside) * 1000,
    }


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
            words = str(next(numbers)) + " yes" * kind.prompt_tokens
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
