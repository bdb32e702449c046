"""A data directory that is deleted or replaced while its server runs is noticed by the lock and by the database."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from art.errors import StorageError
from art.storage.database import Database
from art.storage.lock import DirectoryLock

GONE = "the data directory .*data was deleted, moved or replaced while its server was running"


def test_a_replaced_directory_is_noticed_by_its_lock(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lock = DirectoryLock(data / "server.lock")
    lock.check_directory()
    lock.acquire(0.0)
    lock.check_directory()
    shutil.rmtree(data)
    with pytest.raises(StorageError, match=GONE):
        lock.check_directory()
    other = DirectoryLock(data / "server.lock")
    other.acquire(0.0)
    other.check_directory()
    with pytest.raises(StorageError, match=GONE):
        lock.check_directory()
    lock.release()
    other.release()


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
