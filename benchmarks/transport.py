"""CPU time and memory from `train` to the first micro-batch, for many long rollouts that branch at each turn.

Three processes take part, as in a real step: the user's, which sends the groups; the server, which plans the step from
its record and passes the samples on; and a trainer without a model. The server's event loop and the trainer's
heartbeats are watched meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from art.client.submission import wire_groups
from art.config import TrainConfig
from art.credit.plan import StepPlan, plan_step
from art.credit.resolve import resolve
from art.credit.samples import build_samples
from art.protocol.calls import Train
from art.protocol.rpc import RpcClient
from art.protocol.training import TrainRequest, validate_training
from art.record.recorder import Recorder
from art.runtime.jobs.job import TrainPayload
from art.storage.database import Database
from benchmarks.report import Cell, Result
from benchmarks.transport_child import peak_rss_mb
from benchmarks.transport_workload import NAME, PROJECT, Work, record, trajectory_groups
from benchmarks.worker import end_with_parent

_TICK_S = 0.01
Figures = dict[str, float]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollouts", default="256,2560", help="numbers of rollouts, by comma (default: 256,2560)")
    group.add_argument("--turns", type=int, default=20, help="turns of a rollout (default: 20)")


def run(args: argparse.Namespace) -> Result:
    counts = [16] if args.quick else [int(count) for count in args.rollouts.split(",")]
    rows = [row for count in counts for row in _measure(Work(count, args.turns))]
    return Result(
        summary=(
            f"Rollouts of {args.turns} turns, each a branch of the one before it, because the template drops earlier "
            "reasoning. A path is a branch with all its tokens."
        ),
        rows=rows,
        notes=[
            "The memory of a process is the peak of its resident memory, with Python and its libraries.",
            "`longest wait` is the longest time in which the server's event loop did nothing else, and the longest "
            "time between two heartbeats of the trainer, which sends one each second.",
        ],
    )


def _measure(work: Work) -> list[dict[str, Cell]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _in_process(record, work, folder)
        client = _in_process(_send_groups, work, folder)
        server, trainer = _in_process(_serve, folder)
    assert trainer["num_targets"] == work.num_trained_tokens
    table = {"client": client, "server": server, "trainer": trainer}
    return [
        {
            "rollouts": work.num_rollouts,
            "path tokens": work.num_path_tokens,
            "trained": work.num_trained_tokens,
            "process": process,
            "CPU s": round(sum(value for key, value in figures.items() if key.endswith("_cpu_s")), 2),
            "of which": ", ".join(f"{k[:-6]} {v:.2f}" for k, v in figures.items() if k.endswith("_cpu_s")),
            "peak MB": round(figures["peak_rss_mb"]),
            "sent MB": round(figures.get("sent_mb", 0.0), 2),
            "longest wait s": round(figures.get("longest_wait_s", 0.0), 2),
        }
        for process, figures in table.items()
    ]


def _in_process(function: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        return pool.submit(function, *arguments).result()


@dataclass
class _Clock:
    """CPU time of this process by phase."""

    figures: Figures = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.figures[f"{name}_cpu_s"] = time.process_time() - started


# -- the user's process --


def _send_groups(work: Work, folder: Path) -> Figures:
    groups, clock = trajectory_groups(work), _Clock()
    with clock.phase("encode"):
        request = TrainRequest(
            job_id="job-00000001", groups=wire_groups(groups, with_texts=False), config=TrainConfig()
        )
        body = request.model_dump_json().encode()
    (folder / "body").write_bytes(body)
    return clock.figures | {"sent_mb": len(body) / 1e6, "peak_rss_mb": peak_rss_mb()}


# -- the server --


def _serve(folder: Path) -> tuple[Figures, Figures]:
    return asyncio.run(_train(folder))


async def _train(folder: Path) -> tuple[Figures, Figures]:
    clock, recorder = _Clock(), Recorder(Database(folder / "art.db"))
    waits: list[float] = []
    watch = asyncio.create_task(_watch_loop(waits))
    with clock.phase("parse"):
        body = await asyncio.to_thread(orjson.loads, (folder / "body").read_bytes())
        request = await asyncio.to_thread(validate_training, TrainRequest, body)
    with clock.phase("plan"):
        plan = await asyncio.to_thread(_plan, request, recorder)
    with clock.phase("queue"):
        payload = TrainPayload(config=request.config, plan=plan)
        stored = await asyncio.to_thread(payload.model_dump_json)
        payload = await asyncio.to_thread(TrainPayload.model_validate_json, stored)
    beats: list[float] = []
    async with _trainer(beats) as client:
        with clock.phase("build"):
            call = await asyncio.to_thread(_build_call, payload, recorder)
        with clock.phase("send"):
            written = await asyncio.to_thread(call.written, folder / "samples")
            sent = time.monotonic()
            result: Any = await client.call(written)
    watch.cancel()
    gaps = [later - earlier for earlier, later in itertools.pairwise([sent, *(b for b in beats if b > sent)])]
    own = clock.figures | {
        "sent_mb": (folder / "samples").stat().st_size / 1e6,
        "peak_rss_mb": peak_rss_mb(),
        "longest_wait_s": max(waits),
    }
    return own, result.metrics | {"longest_wait_s": max(gaps, default=0.0)}


def _plan(request: TrainRequest, recorder: Recorder) -> StepPlan:
    groups = resolve(request.groups, recorder.find_answers, project=PROJECT, name=NAME)
    return plan_step(groups, request.config, step=0)


def _build_call(payload: TrainPayload, recorder: Recorder) -> Train:
    return Train(
        samples=build_samples(payload.plan.samples, recorder),
        config=payload.config,
        from_checkpoint=Path("0000"),
        to_checkpoint=Path("0001"),
        job_id="job-00000001",
    )


async def _watch_loop(waits: list[float]) -> None:
    while True:
        started = time.monotonic()
        await asyncio.sleep(_TICK_S)
        waits.append(time.monotonic() - started - _TICK_S)


@contextlib.asynccontextmanager
async def _trainer(beats: list[float]) -> AsyncIterator[RpcClient]:
    """A child process that receives calls as a trainer does; `beats` gets the times of its heartbeats."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.transport_child", "--fd", str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
    theirs.close()
    client = await RpcClient(lambda status: beats.append(time.monotonic())).connect(ours)
    try:
        while not beats:
            await asyncio.sleep(_TICK_S)
        yield client
    finally:
        await client.close()
        process.kill()
        await process.wait()
