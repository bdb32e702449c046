"""Small data directories for tests of the viewer, written by ART's own writers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from art.costs import Ledger
from art.messages import load_choice
from art.model.run_log import RunLog
from art.storage.layout import DataDir
from art.trajectory import Trajectory, TrajectoryGroup

PROJECT, NAME = "games", "agent-001"
RUN = (PROJECT, NAME)


def choice(text: str, exchange_id: str | None = None, *, finish_reason: str = "stop", **message: Any) -> Any:
    """An answer of the model."""
    data: dict[str, Any] = {
        "index": 0, "finish_reason": finish_reason, "logprobs": None,
        "message": {"role": "assistant", "content": text, **message},
    }  # fmt: skip
    return load_choice(data | ({"exchange_id": exchange_id} if exchange_id else {}))


def rollout(reward: float, *texts: str, scenario: str | None = "s1", **fields: Any) -> Trajectory:
    """A trajectory with one question and these answers."""
    items: list[Any] = [{"role": "user", "content": "What is the capital?"}]
    for text in texts or ("Paris",):
        items += [choice(text), {"role": "user", "content": "Are you sure?"}]
    metadata = {} if scenario is None else {"scenario_id": scenario}
    metadata |= fields.pop("metadata", {})
    return Trajectory(messages_and_choices=items[:-1], reward=reward, metadata=metadata, **fields)


def log(
    data_dir: DataDir, groups: list[TrajectoryGroup], step: int, split: str = "train", *, name: str = NAME,
    **metrics: float,
) -> None:  # fmt: skip
    """Log groups and metrics, as `model.log` does."""
    paths = data_dir.model(PROJECT, name)
    row = {name.replace("__", "/"): value for name, value in metrics.items()}
    asyncio.run(RunLog().append(paths, Ledger(path=paths.costs), groups, row, split, step))


def group_file(data_dir: DataDir, step: int, split: str = "train") -> Path:
    """The file of the logged groups of a step."""
    return data_dir.model(PROJECT, NAME).trajectories(split, step)
