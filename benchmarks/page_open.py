"""What training costs more while the page is open on four tabs: the same steps on two servers in turns.

Both servers have the same tiny model, and train the same steps from the same seeds, with the rollouts logged. One has
the page open while it trains, in another process: clients that send what the tabs send, or a real browser. The
tabs are closed while the other server trains.

    python -m benchmarks page_open --json page_open.json
    python -m benchmarks page_open --browser /usr/bin/chromium            real tabs (needs Playwright)
    python -m benchmarks page_open --tabs live,live,live,live
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from art.config import TrainConfig
from benchmarks.live_watchers import BUILD, GROUP_SIZE, Contender, contender
from benchmarks.report import Cell, Result, Spread
from benchmarks.serve_load import NAME, PROJECT
from benchmarks.timing import Timing, progress, ratio

GROUPS, ROLLOUT_TOKENS = 8, 96
TABS = "run,curves,rollouts,live"
SETTLE_S = 1.0
"""Time for the tabs to show their views before a round begins."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tabs", default=TABS, help=f"views that are open (default: {TABS})")
    group.add_argument("--open-steps", type=int, help="training steps of each round (default: 8, with --quick 1)")
    group.add_argument("--browser", metavar="CHROMIUM", help="open the tabs in this browser, headless")


def run(args: argparse.Namespace) -> Result:
    num_steps = args.open_steps or (1 if args.quick else 8)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        subprocess.run([sys.executable, "-c", BUILD, str(model)], check=True, stdout=subprocess.DEVNULL)
        figures = asyncio.run(_measure(Path(name), model, args, num_steps))
    what = "tabs of headless Chromium" if args.browser else "clients that send what tabs send"
    return Result(
        summary=f"{num_steps} training steps of {GROUPS} groups of {GROUP_SIZE} rollouts of {ROLLOUT_TOKENS} tokens in "
        f"each of {args.repeats} rounds, with the page open ({args.tabs}; {what}) and without.",
        rows=figures.rows(num_steps),
        notes=[
            "CPU is that of the server, its engine and its trainer; that of the tabs is in a row of its own",
            "tabs, servers and the training script share the machine",
            f"in a round, the tabs sent {figures.counts['requests'] // args.repeats} requests, of which "
            f"{figures.counts['not_modified'] // args.repeats} were answered with 304",
        ],
    )


@dataclass(slots=True)
class _Figures:
    """Times round by round, and what the tabs have done."""

    watched: list[Timing] = field(default_factory=list)
    alone: list[Timing] = field(default_factory=list)
    tabs_cpu_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, num_steps: int) -> list[dict[str, Cell]]:
        rows: list[dict[str, Cell]] = [
            {
                "measured": f"{num_steps} training steps, {clock.removesuffix('_s')} s",
                "page open": Spread.of([timing.seconds(clock) for timing in self.watched]),
                "closed": Spread.of([timing.seconds(clock) for timing in self.alone]),
                "ratio": ratio(self.watched, self.alone, clock),
            }
            for clock in ("cpu_s", "wall_s")
        ]
        return [
            *rows,
            {"measured": "cpu s of the tabs", "page open": Spread.of(self.tabs_cpu_s), "closed": 0, "ratio": ""},
        ]


@dataclass(slots=True)
class _Tabs:
    """The process of the tabs."""

    process: asyncio.subprocess.Process

    async def do(self, what: str) -> Counter[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        return await self.answer()

    async def answer(self) -> Counter[str]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the tabs ended with status {await self.process.wait()}")
        return Counter(json.loads(line))

    def cpu_s(self) -> float:
        root, total = psutil.Process(self.process.pid), 0.0
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


async def _measure(folder: Path, model: Path, args: argparse.Namespace, num_steps: int) -> _Figures:
    figures = _Figures()
    async with contender(folder / "watched", model) as watched, contender(folder / "alone", model) as alone:
        with progress("page_open", total=args.repeats + 1) as bar:
            await _round(watched, alone, None, figures, 0, num_steps)
            async with _tabs(watched, args.tabs, args.browser) as tabs:
                for number in range(1, args.repeats + 1):
                    bar.update()
                    await _round(watched, alone, tabs, figures, number, num_steps)
    return figures


async def _round(
    watched: Contender, alone: Contender, tabs: _Tabs | None, figures: _Figures, number: int, num_steps: int
) -> None:
    """Train the same steps on both servers; without `tabs`, only to warm up."""
    for one in (watched, alone) if number % 2 else (alone, watched):
        if tabs is None:
            await _train(one, number, num_steps)
        elif one is alone:
            figures.alone.append(await one.measure(lambda: _train(alone, number, num_steps)))
        else:
            await tabs.do("open")
            await asyncio.sleep(SETTLE_S)
            before = tabs.cpu_s()
            figures.watched.append(await one.measure(lambda: _train(watched, number, num_steps)))
            figures.tabs_cpu_s.append(tabs.cpu_s() - before)
            figures.counts += await tabs.do("close")
    if errors := [name for name in figures.counts if name.startswith("error")]:
        raise RuntimeError(f"the page failed: {errors}")


async def _train(one: Contender, number: int, num_steps: int) -> None:
    for step in range(num_steps):
        groups = await one.gather(number * num_steps + step, GROUPS, ROLLOUT_TOKENS)
        await one.agent.train(groups, TrainConfig(learning_rate=1e-4))


@contextlib.asynccontextmanager
async def _tabs(watched: Contender, views: str, browser: str | None) -> AsyncIterator[_Tabs]:
    command = [sys.executable, "-m", "benchmarks.page_tabs", watched.server.client.base_url, f"{PROJECT}/{NAME}", views]
    process = await asyncio.create_subprocess_exec(
        *command, *([browser] if browser else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"ART_API_KEY": watched.server.api_key},
    )  # fmt: skip
    tabs = _Tabs(process)
    try:
        await tabs.answer()
        yield tabs
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["page_open", *sys.argv[1:]])
