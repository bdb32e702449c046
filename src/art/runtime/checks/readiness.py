"""Whether this server can be given work: its base models are loaded, what it records is kept, there is room on disk."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from art.errors import StorageError
from art.runtime.host import BaseModelHost
from art.storage.database import Database

WRITE_TIMEOUT_S = 5.0
"""The database thread is behind by more than that only when the disk hangs."""


async def find_obstacles(
    hosts: Iterable[BaseModelHost], database: Database, root: Path, min_free_bytes: int
) -> dict[str, str]:
    """What keeps the server from working, by what was looked at; empty if nothing does.

    Args:
        hosts: of the base models that it is to have at any time.
    """
    found = {}
    for host in hosts:
        for process in (host.engine_process, host.trainer_process):
            if (state := process.status["state"]) != "up":
                found[process.spec.name] = state
    if problem := await _write_problem(database):
        found["database"] = problem
    free = shutil.disk_usage(root).free
    if free < min_free_bytes:
        found["disk"] = f"{free / 2**20:,.0f} MiB are free; `min_free_bytes` asks for {min_free_bytes / 2**20:,.0f}"
    return found


async def _write_problem(database: Database) -> str | None:
    def write(db: sqlite3.Connection) -> None:
        # A real write, which a full or read-only disk refuses; it goes through the queue of those of requests.
        db.execute("CREATE TABLE IF NOT EXISTS readiness (id INTEGER PRIMARY KEY, asked INTEGER NOT NULL)")
        db.execute("INSERT INTO readiness VALUES (0, 1) ON CONFLICT (id) DO UPDATE SET asked = asked + 1")

    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await database.run(write)
    except TimeoutError:
        return f"a write took longer than {WRITE_TIMEOUT_S:.0f} s"
    except StorageError as error:
        return error.message
    return None
