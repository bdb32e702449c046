"""Read and write `trajectories/<split>/<step>.jsonl`: every logged group on a line. Logging again appends.

A line is `TrajectoryGroup.model_dump_json()`, with null for NaN and infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art.errors import StorageError
from art.storage.jsonl import append_lines, missing_rows, read_lines
from art.trajectory import TrajectoryGroup


def append_groups(path: Path, groups: Iterable[TrajectoryGroup], *, once: bool = False) -> None:
    """Append groups to a file.

    Args:
        once: leave out groups that the file has already. They are from a call that was killed.
    """
    rows = [group.model_dump(mode="json") for group in groups]
    if once:
        rows = missing_rows(path, rows)
    if rows:
        append_lines(path, rows)


def read_groups(path: Path) -> Iterator[TrajectoryGroup]:
    """Yield the groups of a file in the order in which they were logged. A line that a crash has truncated is skipped.
    Raises `StorageError` if a line is not a group."""
    for number, row in read_lines(path):
        if row is None:
            continue
        try:
            yield parse_group(row)
        except ValidationError as error:
            raise StorageError(
                f"{path}, line {number} is not a trajectory group: {error}\n"
                "If your trajectories have a class of your own, import it before reading"
            ) from error


def parse_group(row: dict[str, Any]) -> TrajectoryGroup:
    """Make a group from the object on a line, with NaN for null in rewards and metrics. Null in metadata stays. Raises
    `ValidationError` if it is not a group."""
    for trajectory in row.get("trajectories", ()):
        for key in trajectory.keys() & {"reward", "turn_rewards", "token_rewards", "metrics"}:
            trajectory[key] = _filled(trajectory[key])
    if "metrics" in row:
        row["metrics"] = _filled(row["metrics"])
    return TrajectoryGroup.model_validate(row)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return math.nan if value is None else value
