"""Check that this server is ready: its base models are loaded, the database takes writes, the disk has room."""

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
"""Longest time for a test write to the database. It takes longer only when the disk hangs."""


async def find_obstacles(
    hosts: Iterable[BaseModelHost], database: Database, root: Path, min_free_bytes: int
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
    if problem := await _write_problem(database):
        obstacles["database"] = problem
    free = shutil.disk_usage(root).free
    if free < min_free_bytes:
        obstacles["disk"] = f"{free / 2**20:,.0f} MiB are free; `min_free_bytes` asks for {min_free_bytes / 2**20:,.0f}"
    return obstacles


async def _write_problem(database: Database) -> str | None:
    def write(db: sqlite3.Connection) -> None:
        # A real write, which a full or read-only disk refuses. It waits in the same queue as the writes of requests.
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
