"""CPU time that one chat request costs in each process on its way: client, server and engine, on the tiny model.

Each client keeps 64 or 16 requests under way. Each request has a prompt of its own and an answer of 8 tokens:
- raw: plain aiohttp, which reads the answer as JSON. It is the least that any client costs.
- openai: `model.openai_client()`, which agents use.

With `--cost-sources`, the folders `src` of other checkouts are measured in turns with this one, so that what else the
machine does falls on all alike.

    python -m benchmarks chat_cost --json chat_cost.json
    python -m benchmarks chat_cost --cost-clients raw --cost-sources ../other/src --repeats 9
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import art
from benchmarks.kill_storm import tiny_model
from benchmarks.report import Cell, Result, Spread
from benchmarks.serve_load import NAME, PROJECT, Server, server

OWN_SOURCE = Path(art.__file__).parent.parent
PROCESSES = ("client", "server", "engine")


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cost-requests", type=int, help="in each round (default: 2000, with --quick 64)")
    group.add_argument("--cost-at-once", type=int, nargs="+", default=[64, 16], help="(default: 64 16)")
    group.add_argument("--cost-clients", nargs="+", choices=["raw", "openai"], default=["raw", "openai"])
    group.add_argument("--cost-sources", type=Path, nargs="+", default=[], help="folders `src` to compare with")


def run(args: argparse.Namespace) -> Result:
    count = args.cost_requests or (64 if args.quick else 2000)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        rounds = asyncio.run(measure(Path(name), model, count, args))
    rows: list[dict[str, Cell]] = []
    for (source, kind, at_once), figures in rounds.items():
        row: dict[str, Cell] = {"code": source, "through": kind, "at once": at_once}
        rows.append(row | {key: Spread.of([one[key] for one in figures]) for key in figures[0]})
    return Result(
        summary=f"{count} chat requests in each of {args.repeats} rounds, 8 tokens; CPU ms per request.",
        rows=rows,
        notes=["rounds of all rows take turns; median and range of the rounds"],
    )


async def measure(
    folder: Path, model: Path, count: int, args: argparse.Namespace
) -> dict[tuple[str, str, int], list[dict[str, float]]]:
    """Figures of each round, by the code that is measured, the client and the number of requests at once."""
    sources = [OWN_SOURCE, *(path.resolve() for path in args.cost_sources)]
    async with contextlib.AsyncExitStack() as stack:
        chains = [
            await stack.enter_async_context(chain(folder / f"{i}", model, source, kind))
            for i, source in enumerate(sources)
            for kind in args.cost_clients
        ]
        rounds: dict[tuple[str, str, int], list[dict[str, float]]] = {}
        for number in range(args.repeats + 1):
            for at_once in args.cost_at_once:
                for one in chains if number % 2 else reversed(chains):
                    figures = await one.play(count if number else 4 * at_once, at_once)
                    if number:  # the first round warms up
                        rounds.setdefault((one.code, one.kind, at_once), []).append(figures)
        return rounds


@dataclass(frozen=True, slots=True)
class Chain:
    """A client, a server and its engine, each a process of its own, with the code of one checkout."""

    code: str
    kind: str
    server: Server
    client: asyncio.subprocess.Process

    async def play(self, count: int, at_once: int) -> dict[str, float]:
        before = self._cpu_s()
        wall_s = (await self._ask({"count": count, "at_once": at_once}))["wall_s"]
        spent = {name: (cpu_s - before[name]) / count * 1e3 for name, cpu_s in self._cpu_s().items()}
        return spent | {"sum": sum(spent.values()), "requests/s": count / wall_s}

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(json.dumps(question).encode() + b"\n")
        line = await self.client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with status {await self.client.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process since it began."""
        children = self.server.process.children(recursive=True)
        engine = next(one for one in children if one.name() == "engine_child")
        found = zip(PROCESSES, (psutil.Process(self.client.pid), self.server.process, engine), strict=True)
        return {name: sum(process.cpu_times()[:2]) for name, process in found}


@contextlib.asynccontextmanager
async def chain(data_dir: Path, model: Path, source: Path, kind: str) -> AsyncIterator[Chain]:
    data_dir = data_dir.with_name(f"{data_dir.name}-{kind}")
    async with server(data_dir, source) as one, art.Backend(one.client.base_url, one.api_key) as backend:
        await art.TrainableModel(name=NAME, project=PROJECT, base_model=str(model)).register(backend)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.chat_client", kind, str(model),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": str(source), "ART_API_KEY": one.api_key, "ART_BASE_URL": one.client.base_url},
        )  # fmt: skip
        try:
            yield Chain("this" if source == OWN_SOURCE else str(source.parent.name), kind, one, client)
        finally:
            with contextlib.suppress(ProcessLookupError):
                client.terminate()
            await client.wait()


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["chat_cost", *sys.argv[1:]])
