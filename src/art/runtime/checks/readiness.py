"""Check that this server is ready: its base models are loaded, answers can be recorded, the disk has room."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Iterable
from pathlib import Path

from art.errors import StorageError
from art.gateway.record.recorder import Recorder
from art.runtime.host import BaseModelHost

WRITE_TIMEOUT_S = 5.0
"""Longest time for a test write to the database. It takes longer only when the disk hangs."""


async def find_obstacles(
    hosts: Iterable[BaseModelHost], recorder: Recorder, root: Path, min_free_bytes: int
) -> dict[str, str]:
    """Describe what keeps the server from working, by the name of the check; empty if nothing does.

    Args:
        hosts: hosts of the base models that the server must always serve.
    """
    obstacles = {}
    for host in hosts:
        for process in (host.engine_process, host.trainer_process):
            if (state := process.status["state"]) != "up":
                obstacles[process.spec.name] = state
    if problem := await _problem(recorder.database.run(_write)):
        obstacles["database"] = problem
    elif problem := await _problem(recorder.check()):
        obstacles["recorder"] = problem
    try:
        free = shutil.disk_usage(root).free
    except FileNotFoundError:  # said under `database`
        return obstacles
    if free < min_free_bytes:
        obstacles["disk"] = f"{free / 2**20:,.0f} MiB are free; `min_free_bytes` asks for {min_free_bytes / 2**20:,.0f}"
    return obstacles


def _write(db: sqlite3.Connection) -> None:
    # A real write, which a full or read-only disk refuses. It waits in the same queue as the writes of requests.
    db.execute("CREATE TABLE IF NOT EXISTS readiness (id INTEGER PRIMARY KEY, asked INTEGER NOT NULL)")
    db.execute("INSERT INTO readiness VALUES (0, 1) ON CONFLICT (id) DO UPDATE SET asked = asked + 1")


async def _problem(writing: Awaitable[None]) -> str | None:
    """What keeps a write from being done; `None` if nothing does."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writing
    except TimeoutError:
        return f"a write took longer than {WRITE_TIMEOUT_S:.0f} s"
    except StorageError as error:
        return error.message
    return None
