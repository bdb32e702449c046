"""Read and write `history.jsonl`, which has one row of numbers per `model.log` call.

    {"val/reward": 0.5, "val/win": 0.4, "training_step": 3, "time/wall_clock_sec": 81.2, "step": 3,
     "recorded_at": "2026-01-31T10:00:00+00:00"}

A metric that was NaN or infinite is written as null. A row that its writer named, to write it only once, also has the
name as `row_id`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.storage.jsonl import append_lines, read_lines


def append_row(path: Path, metrics: Mapping[str, float], *, step: int, row_id: str | None = None) -> dict[str, Any]:
    """Append the metrics of one log call, and return the whole row.

    `time/wall_clock_sec` counts from the first row, also after restarts.
    """
    now = datetime.now(UTC)
    row: dict[str, Any] = {key: _number(value) for key, value in metrics.items()}
    row["training_step"] = step
    row.setdefault("time/wall_clock_sec", round((now - (_first_recorded_at(path) or now)).total_seconds(), 3))
    row["step"] = step
    row["recorded_at"] = now.isoformat()
    if row_id is not None:
        row["row_id"] = row_id
    append_lines(path, [row])
    return row


def find_row(path: Path, row_id: str) -> dict[str, Any] | None:
    """Return the row with a name; `None` if there is none."""
    return next((row for _, row in read_lines(path) if row is not None and row.get("row_id") == row_id), None)


def _number(value: Any) -> float | int:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return float(value)


def _first_recorded_at(path: Path) -> datetime | None:
    for _, row in read_lines(path):
        if row and isinstance(row.get("recorded_at"), str):
            return datetime.fromisoformat(row["recorded_at"]).astimezone(UTC)
    return None


def means_by_step(path: Path, metric: str) -> tuple[dict[int, float], int]:
    """Return the mean of a metric for each step at which it has a value, and the number of unreadable lines."""
    values: dict[int, list[float]] = defaultdict(list)
    num_unreadable = 0
    for _, row in read_lines(path):
        if row is None:
            num_unreadable += 1
            continue
        step, value = row.get("step", row.get("training_step")), row.get(metric)
        if isinstance(step, (int, float)) and isinstance(value, (int, float)) and math.isfinite(value):
            values[int(step)].append(float(value))
    return {step: sum(items) / len(items) for step, items in values.items()}, num_unreadable
