"""Whether MCP-RL learns: `art mcp-rl` with the tiny model and the scripted judge on both example servers.

    python -m benchmarks mcp_rl --mcp-seeds 0,1,2
    python -m benchmarks mcp_rl --mcp-servers inventory --mcp-seeds 0 --mcp-folder out     keeps models and reports

The score is that of held-out scenarios: rollouts from before and after training are judged together, as pairs. One tiny
model is made for each server; seeds differ in scenarios to train on, their order and all that is sampled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Cell, Result

EXAMPLES = Path(__file__).parents[1] / "examples" / "mcp_servers"


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mcp-seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    group.add_argument("--mcp-servers", default="inventory,calendar", help="comma-separated (default: both)")
    group.add_argument("--mcp-folder", type=Path, help="keep models and reports here")


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        folder = (args.mcp_folder or Path(directory)).resolve()
        rows = [
            _row(server, int(seed), folder, quick=args.quick)
            for server in args.mcp_servers.split(",")
            for seed in args.mcp_seeds.split(",")
        ]
    return Result(
        summary="Judged score on 12 held-out scenarios, 4 rollouts of each before and after.",
        rows=rows,
        notes=[
            "in brackets: 95 % interval; that of the change is over pairs of scenarios",
            "a model of 0.1 M parameters that was made for the server (examples/mcp_servers/practice.py)",
            "wall s: of making the tiny model, and of `art mcp-rl`",
        ],
    )


def _row(server: str, seed: int, folder: Path, *, quick: bool) -> dict[str, Cell]:
    command = [sys.executable, str(EXAMPLES / "try_it.py"), server, "--seed", str(seed), "--out", str(folder)]
    if quick:
        command += ["--", "--steps", "1", "--held-out-rollouts", "1"]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    report: dict[str, Any] = json.loads((folder / f"{server}-seed{seed}" / "report.json").read_text())
    headline = report["headline"]

    def shown(name: str, form: str) -> str:
        value = headline[name]
        return f"{value['mean']:{form}} ({value['low']:{form}} to {value['high']:{form}})"

    return {
        "server": server, "seed": seed, "before": shown("before", ".2f"), "after": shown("after", ".2f"),
        "change": shown("change", "+.2f"), "wall s": f"{time.perf_counter() - started:.0f}",
    }  # fmt: skip
