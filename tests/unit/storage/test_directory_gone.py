"""A data directory that is deleted or replaced while its server runs is noticed by the lock and by the database."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from art.errors import StorageError
from art.storage.database import Database

GONE = "the data directory .*data was deleted, moved or replaced while its server was running"


def test_a_database_reports_a_deleted_directory(tmp_path: Path) -> None:
    database = Database(tmp_path / "data" / "art.db")
    shutil.rmtree(tmp_path / "data")
    errors: list[BaseException] = []

    def read() -> None:  # a thread that has no connection yet
        try:
            database.read("SELECT 1")
        except (StorageError, sqlite3.Error, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    (error,) = errors
    assert isinstance(error, StorageError)
    assert "was deleted, moved or replaced" in str(error)
    database.close()


def insert(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO notes VALUES ('x')")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_nothing_is_written_into_a_database_that_was_removed(tmp_path: Path, how: str) -> None:
    """SQLite itself goes on writing into the file that it has open, and everything written is lost."""
    database = Database(tmp_path / "data" / "art.db")
    database.run_blocking(lambda db: db.execute("CREATE TABLE notes (text TEXT)"))
    database.run_blocking(insert)
    assert database.read("SELECT count(*) FROM notes") == [(1,)]
    database.path.unlink()
    if how == "replaced":
        database.path.write_bytes(b"")
    with pytest.raises(StorageError, match=r"was deleted, moved or replaced .* or art\.db in it was"):
        database.run_blocking(insert)
    assert database.read("SELECT count(*) FROM notes") == [(1,)]
    with ThreadPoolExecutor() as threads, pytest.raises(StorageError, match=r"art\.db in it was"):
        threads.submit(database.read, "SELECT 1").result()  # a new connection
    assert database.path.exists() == (how == "replaced"), "reading makes no new file"
    database.close()
