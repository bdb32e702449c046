"""How far a cluster goes, counted with engines that answer after a fixed time and compute nothing.

- requests: rollouts of some turns, in groups that share a prompt, through the gate to 1, 2, 4, 8 and 16 engines that
  have dialled in (TCP with TLS): answers per second, the share of prompt tokens that the engine had in its cache, and
  the CPU time of the server's side per request, beside that of an engine at home, over a socket pair.
- rollouts: as many that only wait, in one worker of `art.RayWorkers` and in eight.

    python -m benchmarks cluster --json cluster.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import art
from art.config import ServerConfig
from art.engine import GenerateRequest
from art.protocol.calls import Info
from art.protocol.rpc import RpcClient
from art.runtime.hosting.gated_engine import EngineReplica, GatedEngine
from art.worker.door import KEY_VARIABLE, DoorLauncher, WorkerDoor
from art.worker.launch import Launcher, Process, Program
from art.worker.process import ChildSpec
from benchmarks.report import Cell, Result
from benchmarks.scripted_engine import ANSWER_S, SEATS

COUNTS = (1, 2, 4, 8, 16)
GROUP, TURNS, PROMPT_TOKENS, TURN_TOKENS = 8, 4, 512, 64
BUSY = 1.25
"""Rollouts at once, relative to the seats of all engines: there is always one that waits."""
NUM_ROLLOUTS, WAIT_S = 2000, 0.3


@dataclass(frozen=True, slots=True)
class PipeLauncher:
    """Starts a scripted engine at home, at the other end of a socket pair."""

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.scripted_engine", "--fd", str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        await client.connect(ours)
        return process

    async def close(self) -> None:
        """Do nothing."""


@contextlib.asynccontextmanager
async def engine_of(folder: Path, launchers: list[Launcher]) -> AsyncIterator[GatedEngine]:
    async def ask(replica: EngineReplica, client: RpcClient) -> None:
        await client.call(Info())

    specs = [
        ChildSpec(
            name=f"engine {number}", module="art.worker.engine_child", log_path=folder / f"{number}.log",
            num_threads=1, config=ServerConfig(), launcher=launcher,
        )
        for number, launcher in enumerate(launchers)
    ]  # fmt: skip
    engine = GatedEngine("engine", specs, ask, SEATS)
    engine.start()
    try:
        for replica in engine.replicas:
            await replica.process.connect()
        yield engine
    finally:
        await asyncio.gather(*(replica.process.close() for replica in engine.replicas))


async def play(engine: GatedEngine, group: int, index: int, cached: list[int], prompts: list[int]) -> None:
    """One rollout: its prompt is its group's, and each turn adds an answer and an observation."""
    tokens = [random.Random(group).randrange(1000) for _ in range(PROMPT_TOKENS)]
    rng = random.Random(f"{group} {index}")
    for turn in range(TURNS):
        request = GenerateRequest(
            request_id=secrets.token_hex(4), adapter=None, prompt_token_ids=tokens, max_tokens=8, stop_token_ids=(),
            seed=turn,
        )  # fmt: skip
        chunk = await engine.generate_whole(request)
        cached.append(chunk.num_cached_tokens or 0)
        prompts.append(len(tokens))
        tokens = [*tokens, *chunk.token_ids, *(rng.randrange(1000) for _ in range(TURN_TOKENS))]


async def load(engine: GatedEngine, num_engines: int, seconds: float) -> tuple[float, float, float]:
    """Answers per second, CPU microseconds of this process per answer, and the share of cached prompt tokens."""
    cached: list[int] = []
    prompts: list[int] = []
    numbers = iter(range(10**9))
    started, cpu = time.perf_counter(), time.process_time()

    async def one_after_the_other() -> None:
        while time.perf_counter() - started < seconds:
            number = next(numbers)
            await play(engine, number // GROUP, number % GROUP, cached, prompts)

    await asyncio.gather(*(one_after_the_other() for _ in range(int(BUSY * SEATS * num_engines))))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return len(prompts) / wall_s, 1e6 * cpu_s / len(prompts), sum(cached) / sum(prompts)


@contextlib.contextmanager
def workers(port: int, count: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scripted_engine", "--server", f"127.0.0.1:{port}", "--count", str(count)]
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure_requests(folder: Path, seconds: float) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    async with engine_of(folder, [PipeLauncher()]) as engine:
        at_home = await load(engine, 1, seconds)
    rows.append(_row("1, at home", *at_home, at_home[0]))
    single = 0.0
    for count in COUNTS:
        door = WorkerDoor(os.environ[KEY_VARIABLE])
        await door.open("127.0.0.1", 0)
        with workers(door.port, count):
            launchers: list[Launcher] = [DoorLauncher(door, "engine", folder / "seen") for _ in range(count)]
            async with engine_of(folder, launchers) as engine:
                rate, cpu_us, share = await load(engine, count, seconds)
        await door.close()
        single = single or rate
        rows.append(_row(str(count), rate, cpu_us, share, single * count))
    return rows


def _row(engines: str, rate: float, cpu_us: float, share: float, linear: float) -> dict[str, Cell]:
    return {
        "engines": engines, "answers/s": rate, "of linear": rate / linear, "cached share of prompts": share,
        "CPU us per answer": cpu_us,
    }  # fmt: skip


async def wait_as_a_tool_does(number: int) -> art.Trajectory:
    await asyncio.sleep(WAIT_S)
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": str(number)}], reward=0.0)


async def measure_rollouts(num_rollouts: int) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    alone_s = 0.0
    for count in (1, 8):
        async with art.RayWorkers(count, cpus=0.2) as pool:
            await asyncio.gather(*(pool.run(wait_as_a_tool_does, i) for i in range(8 * 16)))  # all have started
            began = time.perf_counter()
            await asyncio.gather(*(pool.run(wait_as_a_tool_does, i) for i in range(num_rollouts)))
            seconds = time.perf_counter() - began
        alone_s = alone_s or seconds
        rows.append(
            {"workers": count, "rollouts": num_rollouts, "seconds": seconds, "times one worker": alone_s / seconds}
        )
    return rows


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seconds", type=float, help="of each load (default: 10, with --quick 2)")


def run(args: argparse.Namespace) -> Result:
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    seconds = args.seconds or (2.0 if args.quick else 10.0)
    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(measure_requests(Path(name), seconds))
    notes = [
        f"each engine computes {SEATS} answers at once, each in {ANSWER_S:g} s; groups of {GROUP} rollouts of {TURNS} "
        f"turns behind a prompt of {PROMPT_TOKENS} tokens",
        "CPU: of the process with the gate, which also plays the rollouts; all engines run in one other process",
    ]
    if find_spec("ray") is not None:
        done = asyncio.run(measure_rollouts(200 if args.quick else NUM_ROLLOUTS))
        notes += [
            f"{row['rollouts']} rollouts that wait {WAIT_S:g} s in {row['workers']} workers of 16 at once: "
            f"{row['seconds']:.1f} s, {row['times one worker']:.1f} times one worker"
            for row in done
        ]
    return Result(summary="Requests to engines that have dialled in.", rows=rows, notes=notes, clock="wall")
