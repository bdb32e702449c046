"""What people who watch the live view cost: the same work on two servers, one with viewers, one without.

With `--alternatives 5` nobody watches, and one server records the 5 most likely tokens beside each sampled one.

Both servers have the same tiny model, and get the same requests with the same seeds, so they sample the same tokens.
They take turns, so that whatever else the machine does hits both alike. The viewers read the stream of live events over
HTTP, as the page does, and throw it away.

- serving: connections that ask for plain chat answers, one after the other. Nobody streams, so without viewers the
  engine sends each answer as a whole.
- training: steps of some groups, from the rollouts to the published checkpoint.

    python -m benchmarks live_watchers --json live_watchers.json
    python -m benchmarks live_watchers --watchers 16 --repeats 5
    python -m benchmarks live_watchers --alternatives 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import art
from art.config import TrainConfig
from benchmarks.load_client import Connection
from benchmarks.report import Cell, Result, Spread
from benchmarks.serve_load import NAME, PROJECT, Server, server
from benchmarks.timing import Timing, progress, ratio

CONNECTIONS, NEW_TOKENS = 16, 128
GROUPS, GROUP_SIZE, ROLLOUT_TOKENS = 4, 8, 32
READ_BYTES = 2**16
BUILD = """
import sys
from art.testing.tiny_model import build_tiny_model
build_tiny_model(sys.argv[1], warm_start_steps=0)
"""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--watchers", type=int, help="viewers of live events (default: 4)")
    group.add_argument("--alternatives", type=int, help="tokens that one server records, in place of viewers")
    group.add_argument("--answers", type=int, help="chat answers of each round (default: 192, with --quick 32)")
    group.add_argument("--steps", type=int, help="training steps of each round (default: 4, with --quick 1)")


def run(args: argparse.Namespace) -> Result:
    num_watchers = 0 if args.alternatives else args.watchers or 4
    num_answers = args.answers or (32 if args.quick else 192)
    num_steps = args.steps or (1 if args.quick else 4)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        # Without a warm start the model rambles: its answers are as long as they may be.
        subprocess.run([sys.executable, "-c", BUILD, str(model)], check=True, stdout=subprocess.DEVNULL)
        sizes = (num_watchers, num_answers, num_steps)
        figures = asyncio.run(_measure(Path(name), model, args.repeats, sizes, args.alternatives or 0))
    serving, training = figures["serving"], figures["training"]
    what = (
        f"{args.alternatives} recorded alternatives" if args.alternatives else f"{num_watchers} viewers of live events"
    )
    return Result(
        summary=f"{what} against none: {num_answers} plain chat answers of up to "
        f"{NEW_TOKENS} tokens from {CONNECTIONS} connections, and {num_steps} training steps of {GROUPS} groups of "
        f"{GROUP_SIZE} rollouts, in each of {args.repeats} rounds.",
        rows=[
            *serving.rows(f"serving {num_answers} answers"),
            *training.rows(f"{num_steps} training steps"),
            {
                "measured": "kB that each viewer has read", "ratio": "", "without": 0,
                "with": (serving.num_bytes + training.num_bytes) // max(num_watchers, 1) // 1000,
            },
        ],
        notes=[
            "CPU is that of the server, its engine and its trainer; the viewers' own is not in it",
            "both servers are asked for the same answers with the same seeds",
        ],
    )  # fmt: skip


@dataclass(slots=True)
class _Figures:
    """Times of one kind of work, round by round."""

    watched: list[Timing] = field(default_factory=list)
    alone: list[Timing] = field(default_factory=list)
    num_bytes: int = 0

    def rows(self, label: str) -> list[dict[str, Cell]]:
        return [
            {
                "measured": f"{label}, {clock.removesuffix('_s')} s",
                "with": Spread.of([timing.seconds(clock) for timing in self.watched]),
                "without": Spread.of([timing.seconds(clock) for timing in self.alone]),
                "ratio": ratio(self.watched, self.alone, clock),
            }
            for clock in ("cpu_s", "wall_s")
        ]


@dataclass(slots=True)
class Contender:
    """A server with its model."""

    server: Server
    agent: art.TrainableModel
    backend: art.Backend
    connections: list[Connection]

    async def serve(self, number: int, num_answers: int) -> None:
        """Ask for chat answers. The number of the round is part of their seeds."""

        async def ask(place: int) -> None:
            for turn in range(num_answers // CONNECTIONS):
                body = {
                    "model": f"{PROJECT}/{NAME}", "max_tokens": NEW_TOKENS,
                    "messages": [{"role": "user", "content": f"say yes, no or maybe {place}"}],
                    "seed": (number * CONNECTIONS + place) * num_answers + turn,
                }  # fmt: skip
                answer = await self.connections[place].request("/v1/chat/completions", body)
                assert answer.status == 200, answer.body[:300]

        await asyncio.gather(*(ask(place) for place in range(CONNECTIONS)))

    async def train(self, number: int, num_steps: int) -> None:
        for step in range(num_steps):
            groups = await self.gather(number * num_steps + step)
            await self.backend.train(self.agent, groups, config=TrainConfig(learning_rate=1e-4))

    async def gather(
        self, number: int, num_groups: int = GROUPS, num_tokens: int = ROLLOUT_TOKENS
    ) -> list[art.TrajectoryGroup]:
        """Roll out the groups of a step. The number of the step is part of their seeds."""
        return await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    self._rollout(place, (number * num_groups + place) * GROUP_SIZE + i, num_tokens)
                    for i in range(GROUP_SIZE)
                )
                for place in range(num_groups)
            ),
            pbar_desc=None,
        )

    async def _rollout(self, place: int, seed: int, num_tokens: int) -> art.Trajectory:
        messages: list[object] = [{"role": "user", "content": f"respond with yes or no {place}"}]
        completion = await self.agent.openai_client().chat.completions.create(
            model=self.agent.get_inference_name(), messages=messages, seed=seed, max_completion_tokens=num_tokens
        )
        return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=float(seed % 7))

    def cpu_s(self) -> float:
        """CPU time of the server and its children."""
        total = 0.0
        for process in [self.server.process, *self.server.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    async def measure(self, work: Callable[[], Awaitable[None]]) -> Timing:
        cpu_s, started = self.cpu_s(), time.perf_counter()
        await work()
        return Timing(cpu_s=self.cpu_s() - cpu_s, wall_s=time.perf_counter() - started)


async def _measure(
    folder: Path, model: Path, repeats: int, sizes: tuple[int, int, int], alternatives: int
) -> dict[str, _Figures]:
    num_watchers, num_answers, num_steps = sizes
    figures = {"serving": _Figures(), "training": _Figures()}
    settings = {"record_alternatives": alternatives}
    async with contender(folder / "watched", model, settings) as watched, contender(folder / "alone", model) as alone:
        num_bytes = [0] * num_watchers
        viewers = [asyncio.create_task(_watch(watched.server, num_bytes, place)) for place in range(num_watchers)]
        await asyncio.sleep(1.0)
        with progress("live_watchers", total=repeats + 1) as bar:
            for number in range(repeats + 1):
                order = (watched, alone) if number % 2 else (alone, watched)
                for kind, work in (
                    ("serving", lambda one, number=number: one.serve(number, num_answers)),
                    ("training", lambda one, number=number: one.train(number, num_steps)),
                ):
                    before = sum(num_bytes)
                    for one in order:
                        timing = await one.measure(lambda one=one, work=work: work(one))
                        if number > 0:  # the first round warms up
                            (figures[kind].watched if one is watched else figures[kind].alone).append(timing)
                    figures[kind].num_bytes += sum(num_bytes) - before
                bar.update()
        assert not any(viewer.done() for viewer in viewers), "a viewer has lost its stream"
        assert min(num_bytes, default=10**9) > 10_000 * repeats, f"the viewers have read only {num_bytes} bytes"
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
    return figures


@contextlib.asynccontextmanager
async def contender(folder: Path, model: Path, settings: Mapping[str, int] = {}) -> AsyncIterator[Contender]:
    async with server(folder, settings=settings) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        agent = art.TrainableModel(name=NAME, project=PROJECT, base_model=str(model), base_path=str(folder))
        await agent.register(backend)
        connections = [Connection(one.host, one.port, one.api_key) for _ in range(CONNECTIONS)]
        yield Contender(one, agent, backend, connections)
        for connection in connections:
            connection.close()


async def _watch(one: Server, num_bytes: list[int], place: int) -> None:
    """Read live events until cancelled, and count their bytes."""
    reader, writer = await asyncio.open_connection(one.host, one.port)
    head = f"GET /view/api/live HTTP/1.1\r\nhost: {one.host}:{one.port}\r\nauthorization: Bearer {one.api_key}\r\n\r\n"
    writer.write(head.encode())
    try:
        status = await reader.readline()
        assert b" 200 " in status, status
        while data := await reader.read(READ_BYTES):
            num_bytes[place] += len(data)
    finally:
        writer.close()


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["live_watchers", *sys.argv[1:]])
