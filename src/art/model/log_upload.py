"""What a server elsewhere is sent of a model's log, so that its page shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from art.protocol.checkpoint_calls import LogRequest
from art.trajectory import TrajectoryGroup

PART_BYTES = 4 * 2**20
"""Size of the groups in one request. A larger group is sent alone."""


def log_requests(split: str, step: int, row: dict[str, Any], groups: Sequence[TrajectoryGroup]) -> list[LogRequest]:
    """Make the requests that send a row of the history with its groups. Without groups there is one.

    Args:
        row: the row as it was written.
    """
    parts: list[list[dict[str, Any]]] = [[]]
    size = 0
    for group in groups:
        dumped = group.model_dump(mode="json")
        length = len(json.dumps(dumped))
        if parts[-1] and size + length > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(dumped)
        size += length
    return [LogRequest(split=split, step=step, row=row, groups=part) for part in parts]
