"""Read-only access to the database of a data directory, beside the server that writes it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art.storage.database import check_format

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
_ABSENT = ("no such table", "no such column")


class ReadOnlyDatabase:
    """Runs queries on a SQLite file that other processes may write. It never writes and holds no lock between queries.

    Any thread may ask; connections are kept and used again. The file, or a table of it, may be missing: a directory
    that no server has used has no database, and an older one lacks later tables.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: list[sqlite3.Connection] = []
        self._inode = 0
        self._lock = threading.Lock()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the file, a table or a column is missing, or the file is damaged.

        Raises:
            ConfigError: a newer version of ART has written the file.
        """
        connection = self._take()
        if connection is None:
            return []
        try:
            rows = connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            connection.close()
            if not str(error).startswith(_ABSENT):
                logger.warning("cannot read %s: %s", self.path, error)
            return []
        with self._lock:
            self._idle.append(connection)
        return rows

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _take(self) -> sqlite3.Connection | None:
        inode = inode_of(self.path)
        with self._lock:
            if inode != self._inode:  # deleted, or put in place of another
                self._inode = inode
                while self._idle:
                    self._idle.pop().close()
            if self._idle:
                return self._idle.pop()
        if not inode:
            return None
        # A write-ahead log cannot be joined in a folder that may not be written; `immutable` reads the file without it.
        for how in ("mode=ro", "mode=ro&immutable=1"):
            try:
                connection = sqlite3.connect(
                    f"file:{quote(str(self.path))}?{how}", uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False
                )
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
                check_format(connection, self.path)
            except sqlite3.Error as error:
                problem = error
            else:
                return connection
        logger.warning("cannot open %s: %s", self.path, problem)
        return None


def inode_of(path: Path) -> int:
    """Return the number of the file that a path names; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
