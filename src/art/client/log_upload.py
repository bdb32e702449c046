"""Sends what a script logs to a server on another machine, whose page shows it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from art.client.client import ArtClient
from art.errors import ArtError, NotFoundError, PayloadTooLargeError
from art.protocol.run_log import LogRequest
from art.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
"""Size of the groups in one request. A larger group is sent alone."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What one call of `model.log` wrote."""

    split: str
    step: int
    row: dict[str, Any]
    """The row of the history as it was written."""
    groups: list[TrajectoryGroup]


async def send_log(client: ArtClient, project: str, name: str, entry: LogEntry) -> None:
    """Send a row of a model's history with its groups. A failure is logged and not raised: the script has its own log.

    A server of an older version takes no logs. That is said once, and it is asked no more.
    """
    if not client.takes_logs:
        return
    try:
        for part in await asyncio.to_thread(lambda: list(split_groups(entry.groups))):
            try:
                request = LogRequest(split=entry.split, step=entry.step, row=entry.row, groups=part)
                await client.log(project, name, request)
            except PayloadTooLargeError as error:
                logger.warning("the server's page lacks %d groups of step %d: %s", len(part), entry.step, error)
    except NotFoundError as error:
        client.takes_logs = False
        logger.warning("the server takes no logs, so its page shows none of them: %s", error)
    except ArtError as error:
        logger.warning("the server's page lacks what was logged at step %d: %s", entry.step, error)


def split_groups(groups: Sequence[TrajectoryGroup]) -> Iterator[list[dict[str, Any]]]:
    """Yield the groups as objects of JSON, in parts of about `PART_BYTES`. Without groups there is one empty part."""
    part: list[dict[str, Any]] = []
    size = 0
    for group in groups:
        dumped = group.model_dump(mode="json")
        length = len(json.dumps(dumped))
        if part and size + length > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(dumped)
        size += length
    yield part
