"""The SQLite file of a data directory. One thread writes; every thread may read.

Write-ahead logging with `synchronous=FULL` is on: each commit is on the disk before it returns. A committed transaction
therefore survives `kill -9` of the process and a power cut, and what a journal or an answer names is never lost.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from art.errors import ConfigError, DirectoryGoneError, DiskFullError, StorageError

T = TypeVar("T")

FORMAT = 1
"""Form of the data directory, kept as the database's `user_version`. Raise it with a change that older code would
misread. Directories from before there was a format have 0."""
BUSY_TIMEOUT_S = 10.0
_FULL_BELOW_BYTES = 1 << 20
"""A failed write is reported as a full disk if less than this is free, since SQLite then has several error codes."""
_WRITE_ERRORS = {
    sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip


def check_format(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format of the data directory that the database at `path` belongs to. Raises `ConfigError` if this
    version of ART is too old for it."""
    written: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if written > FORMAT:
        connection.close()
        raise ConfigError(
            f"the data directory {path.parent} was written by a newer ART (format {written}); this one reads up to "
            f"format {FORMAT}. Upgrade ART here, or use another data directory"
        )
    return written


def add_columns(db: sqlite3.Connection, table: str, columns: Iterable[str]) -> None:
    """Add the columns, each given by name and definition, that the table of an older version does not have."""
    present = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    for column in columns:
        if column.split()[0] not in present:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


async def uninterrupted(change: Coroutine[Any, Any, T]) -> T:
    """Await a change that must not stop halfway, such as a transaction and what memory keeps of it.

    If the caller is cancelled, the change goes on to its end first. Then the cancellation is raised.
    """
    task = asyncio.ensure_future(change)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # or asyncio logs that nobody has looked at it
        raise cancelled
    return task.result()


class Database:
    """Runs transactions on one SQLite file. Each part of ART creates its own tables and reads no other part's."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            StorageError: the file cannot be opened, or is not a database.
            ConfigError: a newer version of ART has written it.
        """
        self.path = path
        self._local = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._writer.submit(self._open).result()
            self._opened = os.stat(path) if path.exists() else None  # `:memory:` has no file
        except (OSError, sqlite3.Error) as error:
            self._writer.shutdown()
            if isinstance(error, sqlite3.Error) and self._is_full(error):
                raise self._full() from error
            raise StorageError(f"cannot open the database {path}: {error}") from error

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one transaction in the writer thread. Returns once it is committed.

        An exception of `work` rolls the transaction back and is raised here.

        Raises:
            DiskFullError: no space is left. Nothing was written, and later calls work once there is space.
            StorageError: the file was removed or replaced, or SQLite reported any other error.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._transaction, work)

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as `run` does and wait until it is committed, for code outside an event loop."""
        return self._writer.submit(self._transaction, work).result()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query on the caller's thread. It sees everything committed, and never waits for the writer."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        try:
            if connection is None:
                self.check_file()  # SQLite would make a new file
                connection = self._open()
                connection.execute("PRAGMA query_only=ON")
                self._local.connection = connection
                with self._lock:
                    self._readers.append(connection)
            return connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def check_file(self) -> None:
        """Check that the file is still the one that was opened: what is written into a removed file is lost. Raises
        `DirectoryGoneError` if it was removed or replaced."""
        if self._opened is None:
            return
        try:
            is_same = os.path.samestat(os.stat(self.path), self._opened)
        except OSError:
            is_same = False
        if not is_same:
            raise self._gone()

    def close(self) -> None:
        """Finish submitted transactions, then close. Committed transactions are safe without this."""
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
        written = check_format(connection, self.path)
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")
        if written < FORMAT:
            connection.execute(f"PRAGMA user_version={FORMAT}")
        return connection

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        self.check_file()
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
            return self._gone()
        return self._full() if self._is_full(error) else StorageError(f"{self.path}: {error}")

    def _is_full(self, error: sqlite3.Error) -> bool:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _WRITE_ERRORS:
            return shutil.disk_usage(self.path.parent).free < _FULL_BELOW_BYTES
        return code == sqlite3.SQLITE_FULL

    def _gone(self) -> DirectoryGoneError:
        return DirectoryGoneError(
            f"the data directory {self.path.parent} was deleted, moved or replaced while its server was running, or "
            f"{self.path.name} in it was, so nothing is written any more. Close the backend (`await backend.close()`) "
            "or end the server, restore the directory if you have a copy, and start again"
        )

    def _full(self) -> DiskFullError:
        return DiskFullError(f"no space left on the disk of {self.path}; free some and try again")
