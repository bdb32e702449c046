"""Clients that ask for little while somebody else asks a server for a lot: how long do they wait?

async with bystanders(server, chat) as waits:      # /health and a small chat, one after the other, each on its own
    ...                                            # what the greedy client does
waits.health, waits.chat                           # seconds of each answer
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load_client import Connection

PAUSE_S = 0.02
"""Between an answer and the next request."""


@dataclass(slots=True)
class Waits:
    """Seconds that each request of the bystanders took. One that was not answered counts with its time so far."""

    health: list[float] = field(default_factory=list)
    chat: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def bystanders(connections: tuple[Connection, Connection], chat: dict[str, Any]) -> AsyncIterator[Waits]:
    """Ask for `/health` on the first connection and for `chat` on the second while the body runs."""
    waits = Waits()
    tasks = [
        asyncio.create_task(_ask(connections[0], "/health", None, waits.health, waits.faults)),
        asyncio.create_task(_ask(connections[1], "/v1/chat/completions", chat, waits.chat, waits.faults)),
    ]
    try:
        yield waits
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _ask(
    connection: Connection, path: str, body: dict[str, Any] | None, took_s: list[float], faults: list[str]
) -> None:
    while True:
        started = time.perf_counter()
        try:
            answer = await connection.request(path, body)
            if answer.status != 200:
                faults.append(f"{path}: status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        except (OSError, EOFError, TimeoutError) as error:
            faults.append(f"{path}: {type(error).__name__}: {error}")
            connection.close()
        except asyncio.CancelledError:
            if not took_s or time.perf_counter() - started > max(took_s):
                took_s.append(time.perf_counter() - started)
            connection.close()
            raise
        took_s.append(time.perf_counter() - started)
        await asyncio.sleep(PAUSE_S)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
