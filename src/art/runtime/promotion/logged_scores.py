"""Held-out scores in a model's log: the values of rollouts by step and scenario."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.storage.jsonl import read_lines
from art.storage.layout import ModelPaths, validate_name

Row = dict[str, Any]


def check_held_out(split: str) -> str:
    """Return `split` if its rollouts were not learnt from.

    Raises:
        ConfigError: it is `train`.
        InvalidRequestError: it is not a valid name.
    """
    if split == "train":
        raise ConfigError(
            "the rollouts of split 'train' were learnt from, so they cannot show that a checkpoint is better; name a "
            "held-out split such as 'val' or 'test'",
            param="split",
        )
    return validate_name(split, param="split")


def logged_steps(paths: ModelPaths, split: str) -> list[int]:
    """Return the steps at which rollouts of a split were logged, in order."""
    folder = paths.trajectories(split, 0).parent
    return sorted(int(file.stem) for file in folder.glob("*.jsonl") if file.stem.isdecimal())


def logged_scores(path: Path, metric: str) -> dict[str, list[float]]:
    """Read the values of the rollouts in one file of a log, by scenario.

    Rollouts that failed through no fault of the policy (`infra_fault`) and rollouts without the metric are left out.

    Args:
        metric: `reward`, or the name of a metric of rollouts.
    """
    values: dict[str, list[float]] = {}
    for _, group in read_lines(path):
        for rollout in (group or {}).get("trajectories", ()):
            metadata = rollout.get("metadata") or {}
            value = rollout.get("reward") if metric == "reward" else (rollout.get("metrics") or {}).get(metric)
            if metadata.get("outcome") == "infra_fault" or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value):
                values.setdefault(_scenario(group or {}, rollout), []).append(float(value))
    return values


def _scenario(group: Row, rollout: Row) -> str:
    """Name the scenario of a rollout: `scenario_id` in its metadata or its group's, else a hash of its prompt."""
    for record in (rollout, group):
        if (name := (record.get("metadata") or {}).get("scenario_id")) is not None:
            return str(name)
    asked: list[Any] = []
    for message in rollout.get("messages_and_choices", ()):
        if message.get("role") not in ("system", "developer", "user"):
            break
        asked.append(message)
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
