"""A data directory with the logs of two runs, as scripts write them, and no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import art

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def group(step: int, number: int, size: int, text: str) -> art.TrajectoryGroup:
    items: list[Any] = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": text}]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=items, reward=(step + i) / 10, metadata={"scenario_id": f"s{number}"})
            for i in range(size)
        ]
    )  # fmt: skip


async def log_run(
    root: Path, project: str = "games", name: str = "agent", *, steps: int = 3, groups: int = 3, size: int = 4
) -> None:
    """Log training and held-out rollouts of a run into the data directory `root`."""
    model: art.Model = art.Model(name=name, project=project, base_path=str(root))
    for step in range(1, steps + 1):
        logged = [group(step, number, size, f"answer of step {step} {HOSTILE}") for number in range(groups)]
        await model.log(logged, split="train", step=step, metrics={"note": 1.0})
        await model.log([group(step, 0, 2, "held out needle")], split="val", step=step)
