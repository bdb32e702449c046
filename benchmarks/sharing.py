"""Models that learn at once on one server, against the same models one after the other on servers of their own.

Each model trains the same task with its own seed: groups of rollouts of six turns, then held-out scenarios. Agents wait
for tools (log-normal latencies, median 0.2 s, 5 s at 99 %) or have tools that take no time. A run is a script that
starts a server, registers its models, trains them, measures them and ends; its wall time, the CPU time of all its
processes and their peak memory are measured from outside. "One after the other" is the sum of the runs with one model.

    python -m benchmarks sharing --json sharing.json
    python -m benchmarks sharing --kinds waiting --together 1 4 --sharing-steps 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learnt.process_tree import MeasuredCommand, Usage
from benchmarks.pipeline import BUILD
from benchmarks.pipelines.one_server import SCORES
from benchmarks.report import Cell, Result, Spread

KINDS = {"waiting": "tools that wait", "instant": "tools that take no time"}
POLL_S = 0.5
LIMIT_S = 900.0
"""Time limit of one run."""
_COLOURS = {"waiting": "#2f6db3", "instant": "#d9772b"}


@dataclass(frozen=True, slots=True)
class Run:
    """One script with one server: what it took, and what its models scored."""

    seeds: tuple[int, ...]
    usage: Usage
    training_s: float
    """Wall time from the first rollout to the end of the last training step."""
    start_cpu_s: float
    """CPU time until all models were ready: imports, start of the processes, first checkpoints."""
    scores: list[float]
    """Mean held-out reward of each model."""


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of tools (default: both)")
    group.add_argument(
        "--together", type=int, nargs="+", help="numbers of models at once (default: 1 2 4 8, with --quick 1 2)"
    )
    group.add_argument("--sharing-steps", type=int, help="training steps of each model (default: 5, with --quick 2)")
    group.add_argument("--held-out", type=int, help="held-out scenarios (default: 64, with --quick 8)")


def run(args: argparse.Namespace) -> Result:
    steps = args.sharing_steps or (2 if args.quick else 5)
    held_out = args.held_out or (8 if args.quick else 64)
    numbers = sorted({1, *(args.together or ([1, 2] if args.quick else [1, 2, 4, 8]))})
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        warm_start = "20" if args.quick else "150"
        subprocess.run([sys.executable, "-c", BUILD, str(model), warm_start], check=True, stdout=subprocess.DEVNULL)
        for kind in args.kinds:
            measure = _Measuring(Path(name), model, kind, steps, held_out)
            alone = [measure.run((seed,)) for seed in range(max(numbers))]
            for number in numbers:
                together = alone[0] if number == 1 else measure.run(tuple(range(number)))
                rows.append(_row(kind, alone[:number], together))
    return Result(
        summary=f"{steps} steps of 8 groups of 8 rollouts of 6 turns and {held_out} held-out scenarios for each model; "
        "max_staleness 1, one base model, an adapter per model.",
        rows=rows,
        notes=[
            "a run's wall time begins with its script and ends with its last process: imports, start of the server and "
            "held-out scenarios are part of it",
            "`times as fast`: wall time one after the other, divided by that together; on a machine that is paid by "
            "the hour it is also how many times cheaper the models are",
            "`training`: only from the first rollout to the last step, which is most of a long run; start and held-out "
            "scenarios are left out",
            "`times the CPU`: CPU time together, divided by that one after the other; the start is a large part of a "
            "run this short, so the ratio without it has a column of its own",
            "memory is the peak of the sum over all processes of the script, with shared pages counted once (PSS)",
            "`score` is the mean held-out reward of the models with its range. Rollouts that run ahead are trained "
            "when they end, so the same seed does not give the same numbers in two runs",
        ],
        clock="wall",
    )


@dataclass(frozen=True, slots=True)
class _Measuring:
    folder: Path
    model: Path
    kind: str
    steps: int
    held_out: int

    def run(self, seeds: tuple[int, ...]) -> Run:
        """Train models with these seeds at once on a server of their own."""
        folder = self.folder / f"{self.kind}-{'-'.join(map(str, seeds))}"
        command = [
            sys.executable, "-m", "benchmarks.pipelines.one_server", str(self.model), str(folder), "--kind", self.kind,
            "--steps", str(self.steps), "--held-out", str(self.held_out), "--seeds", *map(str, seeds),
        ]  # fmt: skip
        folder.mkdir()
        measured = MeasuredCommand(command, log=folder / "log.txt")
        deadline = time.monotonic() + LIMIT_S
        try:
            while not measured.poll():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{len(seeds)} models took longer than {LIMIT_S:g} s")
                time.sleep(POLL_S)
        finally:
            measured.end()
        if measured.exit_code != 0:
            raise RuntimeError(f"the run failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
        found = json.loads((folder / SCORES).read_text())
        shutil.rmtree(folder)
        usage = measured.usage
        print(
            f"{self.kind}, {len(seeds)} at once: {usage.wall_s:.0f} s, {usage.cpu_s:.0f} s of CPU, "
            f"{usage.peak_memory_bytes / 2**20:.0f} MiB, training {found['training_s']:.0f} s, "
            f"scores {' '.join(format(score, '.2f') for score in found['scores'])}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return Run(seeds, usage, found["training_s"], found["start_cpu_s"], found["scores"])


def _row(kind: str, alone: Sequence[Run], together: Run) -> dict[str, Cell]:
    number = len(alone)
    wall_s = sum(one.usage.wall_s for one in alone)
    cpu_s = sum(one.usage.cpu_s for one in alone)
    training_s = sum(one.training_s for one in alone)
    training_cpu_s = cpu_s - sum(one.start_cpu_s for one in alone)
    together_cpu_s = together.usage.cpu_s - together.start_cpu_s
    memory = max(one.usage.peak_memory_bytes for one in alone)
    return {
        "tools": KINDS[kind],
        "models": number,
        "one after the other s": wall_s,
        "together s": together.usage.wall_s,
        "times as fast": wall_s / together.usage.wall_s,
        "training s, one after the other": training_s,
        "training s, together": together.training_s,
        "training, times as fast": training_s / together.training_s,
        "CPU s, one after the other": cpu_s,
        "CPU s, together": together.usage.cpu_s,
        "times the CPU": together.usage.cpu_s / cpu_s,
        "times the CPU after the start": together_cpu_s / training_cpu_s,
        "MiB, one model": memory / 2**20,
        "MiB, together": together.usage.peak_memory_bytes / 2**20,
        "MiB per model": together.usage.peak_memory_bytes / 2**20 / number,
        "score, one after the other": Spread.of([score for one in alone for score in one.scores]),
        "score, together": Spread.of(together.scores),
    }


def draw(result: Result) -> Any:
    """Draw wall time, CPU time and memory per model, by the number of models on one server."""
    from matplotlib.figure import Figure

    columns = {
        "wall s per model": lambda row: row["together s"] / row["models"],
        "CPU s per model": lambda row: row["CPU s, together"] / row["models"],
        "peak MiB per model": lambda row: row["MiB per model"],
    }
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        for kind, words in KINDS.items():
            rows: list[Any] = [row for row in result.rows if row["tools"] == words]
            if rows:
                numbers = [row["models"] for row in rows]
                axes.plot(numbers, [value(row) for row in rows], "o-", color=_COLOURS[kind], label=words)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["models"] for row in result.rows if isinstance(row["models"], int)})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("models that learn at once on one server")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#d9d9d9", linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure
