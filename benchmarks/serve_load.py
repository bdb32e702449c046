"""A server under load: a thousand streams at once, rollouts beside a training job, and what the gateway itself adds.

Three measurements on the tiny model, each with a server of its own:
- streams: so many connections ask for streamed chat answers, one after the other. An answer must be whole, or a 429
  that says when to come again. Memory of server and engine is read all the while.
- rollouts: so many rollouts of several turns at once, alone and while training jobs run one after the other.
- latency: an engine that takes its time but no work, 16 requests at once; what a request takes beyond the engine's own
  time is the gateway's, the sockets' and the client's.

    python -m benchmarks serve_load --json serve_load.json
    python -m benchmarks serve_load --streams 100 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import art
from art.client.client import ServerClient
from art.config import TrainConfig
from benchmarks import gateway_overhead
from benchmarks.kill_storm import tiny_model
from benchmarks.load_client import Connection, Tally, stream_for
from benchmarks.report import Cell, Result, Spread, middle
from benchmarks.timing import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROJECT, NAME = "load", "agent"
PROMPTS = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?"]
NEW_TOKENS = 16
TURNS, GROUP_SIZE = 4, 8
LATENCY_AT_ONCE = 16
ENGINE_S = 0.1
"""What the engine takes for an answer where the gateway is measured: long enough that requests do not queue up."""
MEMORY_EVERY_S = 2.0
QUARTERS = 4
"""Memory is reported at the end of each of so many parts of the time."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--streams", type=int, help="connections at once (default: 1000, with --quick 50)")
    group.add_argument("--seconds", type=float, help="how long they ask (default: 60, with --quick 5)")
    group.add_argument("--rollouts", type=int, help="at once, beside a training job (default: 200, with --quick 16)")


def run(args: argparse.Namespace) -> Result:
    num_streams = args.streams or (50 if args.quick else 1000)
    seconds = args.seconds or (5.0 if args.quick else 60.0)
    num_rollouts = args.rollouts or (16 if args.quick else 200)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        tally, memory = asyncio.run(measure_streams(Path(name) / "streams", model, num_streams, seconds))
        rollouts = asyncio.run(measure_rollouts(Path(name) / "rollouts", model, num_rollouts))
    rows = [
        *_stream_rows(tally, memory, num_streams, seconds),
        *_rollout_rows(rollouts, num_rollouts),
        *_latency_rows(args),
    ]
    return Result(
        summary=f"{num_streams} streams at once for {seconds:.0f} s; {num_rollouts} rollouts at once beside training; "
        f"{LATENCY_AT_ONCE} requests at once to an engine that only waits.",
        rows=rows,
        notes=[
            "faults: any answer that is neither whole nor a 429 with Retry-After, broken connections and answers that "
            "take longer than two minutes",
            "client, server and engine share the machine; the latency of many streams is that of a queue",
            "what the gateway adds: request by request, the latency that the client sees less what the engine took",
            *(f"fault, {count} times: {fault}" for fault, count in tally.faults.most_common(5)),
            *(f"failed rollout: {error}" for error in rollouts.errors[:5]),
        ],
        clock="wall",
    )


# -- the server under test ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    client: ServerClient
    host: str
    port: int
    api_key: str
    process: psutil.Process

    def memory_mib(self) -> dict[str, float]:
        """Resident memory by kind of process."""
        found = {"server": self.process.memory_info().rss / 2**20}
        with contextlib.suppress(psutil.Error):
            for child in self.process.children(recursive=True):
                if child.name() in ("engine_child", "trainer_child"):
                    found[child.name().removesuffix("_child")] = child.memory_info().rss / 2**20
        return found


@contextlib.asynccontextmanager
async def server(data_dir: Path, source: Path | None = None, settings: Mapping[str, int] = {}) -> AsyncIterator[Server]:
    """`art-server` as a program of its own, with settings; `source` is the folder `src` of another checkout to take it
    from."""
    api_key = secrets.token_hex(16)
    command = [sys.executable, "-m", "art.cli.server", "--port", "0", "--data-dir", str(data_dir), "--die-with-parent"]
    command += ["--config-json", json.dumps(settings)] if settings else []
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"ART_API_KEY": api_key} | ({} if source is None else {"PYTHONPATH": str(source)}),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = ""
        while not url:
            line = (await process.stdout.readline()).decode()
            if not line:
                raise RuntimeError(f"art-server ended with status {await process.wait()}")
            url = next((word for word in line.split() if word.startswith("http://")), "")
        host, _, port = url.removeprefix("http://").partition(":")
        async with ServerClient(url, api_key) as client:
            yield Server(client, host, int(port), api_key, psutil.Process(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# -- many streams ------------------------------------------------------------------------------------------------------


async def measure_streams(
    data_dir: Path, model: Path, count: int, seconds: float
) -> tuple[Tally, dict[str, list[float]]]:
    """What became of the requests, and MiB of each process at the end of each quarter."""
    async with server(data_dir) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        await art.TrainableModel(name=NAME, project=PROJECT, base_model=str(model)).register(backend)
        connections = [Connection(one.host, one.port, one.api_key) for _ in range(count)]
        rng = random.Random(0)

        def body() -> dict[str, Any]:
            messages = [{"role": "user", "content": f"{rng.choice(PROMPTS)} {rng.randrange(1000)}"}]
            return {"model": f"{PROJECT}/{NAME}", "messages": messages, "stream": True, "max_tokens": NEW_TOKENS}

        warm_up = time.monotonic() + min(5.0, seconds)
        await asyncio.gather(*(stream_for(connection, body, Tally(), until=warm_up) for connection in connections))
        tally, start = Tally(), time.monotonic()
        watching = asyncio.create_task(_watch_memory(one, start + seconds))
        await asyncio.gather(
            *(stream_for(connection, body, tally, until=start + seconds) for connection in connections)
        )
        for connection in connections:
            connection.close()
        return tally, await watching


async def _watch_memory(one: Server, until: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    with progress("streams", total=max(1, round((until - time.monotonic()) / MEMORY_EVERY_S))) as bar:
        while time.monotonic() < until:
            for kind, mib in one.memory_mib().items():
                samples.setdefault(kind, []).append(mib)
            bar.update()
            await asyncio.sleep(MEMORY_EVERY_S)
    return {
        kind: [values[max(0, len(values) * quarter // QUARTERS - 1)] for quarter in range(1, QUARTERS + 1)]
        for kind, values in samples.items()
    }


def _stream_rows(tally: Tally, memory: dict[str, list[float]], count: int, seconds: float) -> list[dict[str, Cell]]:
    first = sorted(answer.first_s * 1e3 for answer in tally.answered) or [float("nan")]
    whole = sorted(answer.whole_s * 1e3 for answer in tally.answered) or [float("nan")]
    label = f"{count} streams"
    rows = [
        _row(f"{label}: whole answers", len(tally.answered)),
        _row(f"{label}: refused with 429", tally.num_refused),
        _row(f"{label}: faults", tally.faults.total()),
        _row(f"{label}: answers/s", len(tally.answered) / seconds),
        _row(f"{label}: first token, ms, median", statistics.median(first)),
        _row(f"{label}: first token, ms, 99 %", _percentile(first, 0.99)),
        _row(f"{label}: whole answer, ms, median", statistics.median(whole)),
        _row(f"{label}: whole answer, ms, 99 %", _percentile(whole, 0.99)),
    ]
    for kind, values in memory.items():
        rows += [
            _row(f"memory of the {kind}, MiB, after {(quarter + 1) * seconds / QUARTERS:.0f} s", value)
            for quarter, value in enumerate(values)
        ]
    return rows


# -- rollouts beside training ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutFigures:
    alone_s: float = 0.0
    beside_s: float = 0.0
    steps_beside: list[float] = field(default_factory=list)
    """Seconds of each training step that ran meanwhile."""
    step_alone_s: float = 0.0
    errors: list[str] = field(default_factory=list)


async def measure_rollouts(data_dir: Path, model: Path, count: int) -> RolloutFigures:
    figures = RolloutFigures()
    async with server(data_dir) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        agent = art.TrainableModel(name=NAME, project=PROJECT, base_model=str(model), base_path=str(data_dir))
        await agent.register(backend)
        groups = await _rollouts(agent, count, 0, figures)  # also warms up
        started = time.monotonic()
        groups = await _rollouts(agent, count, 1, figures)
        figures.alone_s = time.monotonic() - started
        await backend.train(agent, groups, config=TrainConfig(learning_rate=1e-4))  # starts the trainer
        started = time.monotonic()
        await backend.train(agent, groups, config=TrainConfig(learning_rate=1e-4))
        figures.step_alone_s = time.monotonic() - started

        async def train_meanwhile() -> None:
            while True:
                began = time.monotonic()
                await backend.train(agent, groups, config=TrainConfig(learning_rate=1e-4))
                figures.steps_beside.append(time.monotonic() - began)

        training = asyncio.create_task(train_meanwhile())
        await asyncio.sleep(0.2)  # the job is under way
        started = time.monotonic()
        await _rollouts(agent, count, 2, figures)
        figures.beside_s = time.monotonic() - started
        while not figures.steps_beside and not training.done():
            await asyncio.sleep(0.1)
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
    return figures


async def _rollouts(
    agent: art.TrainableModel, count: int, seed: int, figures: RolloutFigures
) -> list[art.TrajectoryGroup]:
    """`count` at once, in groups; failures are noted."""
    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(_rollout(agent, place, 1000 * seed + GROUP_SIZE * place + i) for i in range(GROUP_SIZE))
            for place in range(count // GROUP_SIZE)
        ),
        pbar_desc=None,
        max_exceptions=count,
    )
    figures.errors += [f"{error.type}: {error.message}" for group in groups for error in group.exceptions]
    return groups


async def _rollout(agent: art.TrainableModel, scenario: int, seed: int) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=[], reward=random.Random(seed).random())
    client = agent.openai_client()
    for turn in range(TURNS):
        question = f"{PROMPTS[scenario % len(PROMPTS)]} {scenario}"
        trajectory.messages_and_choices.append({"role": "user", "content": question})
        completion = await client.chat.completions.create(
            model=agent.get_inference_name(), messages=trajectory.messages(), seed=TURNS * seed + turn,
            max_completion_tokens=NEW_TOKENS,
        )  # fmt: skip
        trajectory.messages_and_choices.append(completion.choices[0])
    return trajectory


def _rollout_rows(figures: RolloutFigures, count: int) -> list[dict[str, Cell]]:
    label = f"{count} rollouts of {TURNS} turns"
    steps: Cell = Spread.of(figures.steps_beside) if figures.steps_beside else "none was finished"
    return [
        _row(f"{label}: failed", len(figures.errors)),
        _row(f"{label}: alone, s", figures.alone_s),
        _row(f"{label}: while training jobs run, s", figures.beside_s),
        _row("a training job on them: alone, s", figures.step_alone_s),
        _row("a training job on them: beside rollouts, s", steps),
    ]


# -- what the gateway adds ---------------------------------------------------------------------------------------------


def _latency_rows(args: argparse.Namespace) -> list[dict[str, Cell]]:
    rows = []
    for streamed in (False, True):
        settings = argparse.Namespace(
            model=None, conversations=LATENCY_AT_ONCE * (2 if args.quick else 16), turns=TURNS, quick=False,
            concurrency=LATENCY_AT_ONCE, stream=streamed, profile=None, repeats=args.repeats,
        )  # fmt: skip
        figures = gateway_overhead.figures(settings, ENGINE_S)
        added = [one["added ms, median"] for one in figures]
        rows.append(_row(f"the gateway adds, ms, median, {'streamed' if streamed else 'plain'}", Spread.of(added)))
    return rows


def _row(measured: str, value: Cell) -> dict[str, Cell]:
    return {"measured": measured, "value": value}


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def draw(result: Result) -> Figure:
    """Memory of each process over the time of the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind in ("server", "engine", "trainer"):
        prefix = f"memory of the {kind}, MiB, after "
        points = [
            (float(str(row["measured"]).removeprefix(prefix).removesuffix(" s")), middle(row["value"]))
            for row in result.rows
            if str(row["measured"]).startswith(prefix)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=kind)
    axes.set(xlabel="seconds of load", ylabel="resident memory, MiB", title=result.summary.partition(";")[0])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["serve_load", *sys.argv[1:]])
