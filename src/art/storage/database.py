"""The SQLite file of a data directory: one thread writes, anyone reads.

Write-ahead logging with `synchronous=NORMAL`: a committed transaction survives `kill -9` of the process at any moment
(its pages are with the operating system); a power cut may lose the last ones but never corrupts the file.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from art.errors import DiskFullError, StorageError
from art.storage.lock import directory_gone

T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0
_FULL_BELOW_BYTES = 1 << 20
"""A failed write with less free space than this is reported as a full disk: WAL files fail in several ways then."""
_WRITE_ERRORS = {
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMMAP,
    sqlite3.SQLITE_CANTOPEN,
}


class Database:
    """All tables of one server. Each part creates and owns its tables; none reads another's."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            StorageError: it cannot be opened, or is no database.
        """
        self.path = path
        self._local = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._writer.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._writer.shutdown()
            raise StorageError(f"cannot open the database {path}: {error}") from error

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one transaction in the writer thread; returns once it is committed.

        An exception of `work` rolls everything back and is raised here.

        Raises:
            DiskFullError: there is no space left; nothing was written, and later calls work once there is.
            StorageError: any other failure of SQLite.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._transaction, work)

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`run` for code outside an event loop."""
        return self._writer.submit(self._transaction, work).result()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query, on the caller's thread; sees everything committed, and never waits for a writer."""
        try:
            return self._reader().execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def close(self) -> None:
        """Finish what was submitted, then close. Every commit is already safe without this."""
        self._writer.submit(self._connection.close).result()
        self._writer.shutdown()
        with self._lock:
            for reader in self._readers:
                reader.close()

    def _open(self) -> sqlite3.Connection:
        # Transactions are explicit (isolation_level=None); `close` may come from another thread.
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._open()
            connection.execute("PRAGMA query_only=ON")
            self._local.connection = connection
            with self._lock:
                self._readers.append(connection)
        return connection

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                if connection.in_transaction:  # `executescript` commits by itself
                    connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._translate(error) from error
        return result

    def _translate(self, error: sqlite3.Error) -> StorageError:
        if not self.path.exists():
            return directory_gone(self.path.parent)
        code = getattr(error, "sqlite_errorcode", None)
        full = code == sqlite3.SQLITE_FULL
        if not full and code in _WRITE_ERRORS:
            full = shutil.disk_usage(self.path.parent).free < _FULL_BELOW_BYTES
        if full:
            return DiskFullError(f"no space left on the device of {self.path}; free some and send the request again")
        return StorageError(f"{self.path}: {error}")
