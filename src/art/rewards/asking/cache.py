"""A cache of judgements on disk, in SQLite, so that no judgement is paid for twice. Failures are not cached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S = 10.0


class JudgeCache:
    """A cache of judgements as JSON in a file, which several processes may share. Without `path` it keeps nothing.

    If the file cannot be used, a warning is logged and nothing is cached.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._broken = False

    async def get(self, key: str) -> Any:
        """The value that was stored under `key`, or `None`."""
        row = await self._run("SELECT value FROM judgements WHERE key = ?", (key,))
        return None if row is None else json.loads(row[0])

    async def put(self, key: str, value: Any) -> None:
        values = (key, json.dumps(value), time.time())
        await self._run("INSERT OR REPLACE INTO judgements (key, value, created_at) VALUES (?, ?, ?)", values)

    async def _run(self, statement: str, values: tuple[Any, ...]) -> Any:
        if self._path is None or self._broken:
            return None
        try:
            return await asyncio.to_thread(_execute, self._path, statement, values)
        except (sqlite3.Error, OSError) as error:
            self._broken = True
            logger.warning("continuing without the cache of judgements in %s: %s", self._path, error)
            return None


def _execute(path: Path, statement: str, values: tuple[Any, ...]) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)) as database, database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS judgements "
            "(key TEXT PRIMARY KEY, value TEXT NOT NULL, created_at REAL NOT NULL)"
        )
        return database.execute(statement, values).fetchone()
