"""Reading a server's database beside the server."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from art.storage.database import Database
from art_page.databases import ReadOnlyDatabase


def write(path: Path, *values: int) -> Database:
    database = Database(path)
    database.run_blocking(lambda db: db.execute("CREATE TABLE IF NOT EXISTS t (x)"))
    for value in values:
        database.run_blocking(lambda db, value=value: db.execute("INSERT INTO t VALUES (?)", (value,)))  # type: ignore[misc]
    return database


def test_it_sees_what_is_committed_and_writes_nothing(tmp_path: Path) -> None:
    writer = write(tmp_path / "art.db", 1)
    reader = ReadOnlyDatabase(tmp_path / "art.db")
    assert reader.read("SELECT x FROM t") == [(1,)]
    write(tmp_path / "art.db", 2).close()
    assert reader.read("SELECT x FROM t ORDER BY x") == [(1,), (2,)]
    assert reader.read("INSERT INTO t VALUES (3)") == []
    assert reader.read("SELECT count(*) FROM t") == [(2,)]
    writer.run_blocking(lambda db: db.execute("DROP TABLE t"))  # no reader holds a lock
    writer.close()


def test_what_is_missing_has_no_rows(tmp_path: Path) -> None:
    reader = ReadOnlyDatabase(tmp_path / "art.db")
    assert reader.read("SELECT 1") == []
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "art.db", 1).close()
    assert reader.read("SELECT x FROM nothing") == []
    assert reader.read("SELECT y FROM t") == []
    assert reader.read("SELECT x FROM t") == [(1,)]


def test_a_damaged_file_has_no_rows_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "art.db").write_bytes(b"no database" * 1000)
    with caplog.at_level(logging.WARNING):
        assert ReadOnlyDatabase(tmp_path / "art.db").read("SELECT 1") == []
    assert "art.db" in caplog.text


def test_a_file_that_takes_the_place_of_another_is_read(tmp_path: Path) -> None:
    write(tmp_path / "art.db", 1).close()
    write(tmp_path / "other.db", 7).close()
    reader = ReadOnlyDatabase(tmp_path / "art.db")
    assert reader.read("SELECT x FROM t") == [(1,)]
    shutil.move(tmp_path / "other.db", tmp_path / "art.db")
    assert reader.read("SELECT x FROM t") == [(7,)]


def test_a_log_that_cannot_be_joined_does_not_hide_the_file(tmp_path: Path) -> None:
    write(tmp_path / "art.db", 1).close()
    (tmp_path / "art.db-wal").mkdir()  # as in a folder that may not be written; root may write all
    reader = ReadOnlyDatabase(tmp_path / "art.db")
    assert reader.read("SELECT x FROM t") == [(1,)]
