"""Whether an agent learns, how fast and where the time goes: `art demo` over several seeds.

Each seed makes its own tiny model (warm start), plays the held-out games before and after training, and writes a
summary; this tabulates the summaries. Seeds run one after the other in the configuration that users get.

    python -m benchmarks learning --seeds 0,1,2
    python -m benchmarks learning --seeds 0 --steps 20 --games 100
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Cell, Result

_PARTS = ("rollout", "train", "publish", "other")


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    group.add_argument("--task", default="tic_tac_toe")
    group.add_argument("--steps", type=int, help="training steps (default: the task's own)")
    group.add_argument("--games", type=int, help="held-out games before and after (default: 400)")


def run(args: argparse.Namespace) -> Result:
    summaries = [_run_demo(int(seed), args) for seed in args.seeds.split(",")]
    rows = [_row(summary) for summary in summaries]
    rows.append({"seed": "mean", **_means(summaries)})
    first = summaries[0]
    return Result(
        summary=f"{first['metric']} of {first['task']} on {first['games']} held-out games, {first['steps']} steps.",
        rows=rows,
        notes=[
            "in brackets: 95 % interval of the games",
            "wall s: everything from the warm start to the last game; the following columns are its parts, and the "
            "warm start is part of train",
            "CPU s: of all processes together",
        ],
    )


def _run_demo(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run, with `cpu_s`.

    Raises:
        RuntimeError: the demo failed; the message has its last lines.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "summary.json"
        command = [sys.executable, "-m", "art.cli.main", "demo", "--task", args.task, "--seed", str(seed)]
        games = args.games or (20 if args.quick else 400)
        command += ["--games", str(games), "--out", f"{directory}/demo", "--json", str(report)]
        if (steps := args.steps or (2 if args.quick else None)) is not None:
            command += ["--steps", str(steps)]
        before = _children_cpu_s()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
        summary: dict[str, Any] = json.loads(report.read_text())
        return {**summary, "cpu_s": _children_cpu_s() - before}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _row(summary: dict[str, Any]) -> dict[str, Cell]:
    def with_interval(when: str) -> str:
        low, high = summary[f"interval_{when}"]
        return f"{summary[when]:.3f} ({low:.3f} to {high:.3f})"

    return {
        "seed": summary["seed"],
        "before": with_interval("before"),
        "after": with_interval("after"),
        **_times(summary),
    }


def _means(summaries: list[dict[str, Any]]) -> dict[str, Cell]:
    mean = {
        key: statistics.mean(summary[key] for summary in summaries)
        for key, value in summaries[0].items()
        if isinstance(value, int | float)
    }
    return {"before": f"{mean['before']:.3f}", "after": f"{mean['after']:.3f}", **_times(mean)}


def _times(summary: dict[str, Any]) -> dict[str, Cell]:
    wall_s = summary["wall_s"]
    parts = {part: f"{summary[f'{part}_s']:.1f} ({summary[f'{part}_s'] / wall_s:.0%})" for part in _PARTS}
    return {"wall s": f"{wall_s:.1f}", **parts, "CPU s": f"{summary['cpu_s']:.1f}"}
