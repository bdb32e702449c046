"""Trains models at once on one server that it starts, measures them on held-out scenarios, and ends.

    python -m benchmarks.pipelines.one_server MODEL FOLDER --seeds 0 1 2 3 --kind waiting --steps 5

`benchmarks.sharing` runs this as a command whose time and memory it measures. The scores are written to
FOLDER/scores.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import psutil

import art
from benchmarks.pipelines.arms import Arm, Plan, run_arm

MAX_STALENESS = 1
"""The default of `art train`."""
SCORES = "scores.json"


async def train_all(model: str, folder: Path, plans: list[Plan]) -> tuple[dict[str, float], list[Arm]]:
    """Register a model for each plan with one server, and train all of them at once.

    Returns:
        Wall time and CPU time of the processes until all models are ready, and what each training led to.
    """
    async with art.LocalBackend(path=folder / "data", show_page=False) as backend:
        agents = [
            art.TrainableModel(name=f"agent-{plan.seed}", project="shared", base_model=model, report_metrics=[])
            for plan in plans
        ]
        for agent in agents:
            await agent.register(backend)
        start = {"start_s": time.time() - psutil.Process().create_time(), "start_cpu_s": _cpu_s()}
        arms = await asyncio.gather(
            *(run_arm(agent, plan, MAX_STALENESS) for agent, plan in zip(agents, plans, strict=True))
        )
        return start, arms


def _cpu_s() -> float:
    """CPU time of this process and all processes below it."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--held-out", type=int, required=True)
    args = parser.parse_args()
    plans = [Plan(kind=args.kind, seed=seed, steps=args.steps, held_out=args.held_out) for seed in args.seeds]
    args.folder.mkdir(parents=True, exist_ok=True)
    start, arms = asyncio.run(train_all(args.model, args.folder, plans))
    result = start | {"training_s": max(arm.wall_s for arm in arms), "scores": [arm.score for arm in arms]}
    (args.folder / SCORES).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
