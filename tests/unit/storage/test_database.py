"""The database of a data directory: what a commit promises, and which forms of the directory this version reads."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from art.cli.main import main as art
from art.cli.server import main as art_server
from art.errors import ConfigError, DiskFullError
from art.storage.database import Database
from art.storage.layout import DataDir
from art_page.databases import ReadOnlyDatabase
from tests.support.small_disk import fill
from tests.support.small_disk import small_disk as small_disk  # a fixture

FULL = 2
TOO_NEW = "was written by a newer ART .format 99.; this one reads up to format"


async def test_each_commit_is_synced(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    assert await database.run(lambda db: db.execute("PRAGMA synchronous").fetchone()[0]) == FULL
    database.close()


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The database of a data directory that a newer version has written."""
    path = DataDir(tmp_path).database
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=99")
    return path


def test_a_newer_data_directory_is_refused_in_words(newer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=TOO_NEW):
        Database(newer)
    with pytest.raises(ConfigError, match=TOO_NEW):
        ReadOnlyDatabase(newer).read("SELECT 1")
    assert art_server(["--data-dir", str(newer.parent), "--port", "0"]) == 1
    assert f"the data directory {newer.parent} was written by a newer ART" in capsys.readouterr().err


def test_newer_keys_are_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(DataDir(tmp_path).keys)) as db:
        db.execute("PRAGMA user_version=99")
    assert art(["keys", "list", "--data-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "was written by a newer ART" in shown
    assert "Restore the file" not in shown


def test_a_directory_from_before_there_was_a_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "art.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE kept (value TEXT)")
        db.execute("INSERT INTO kept VALUES ('x')")
        db.commit()
    for _ in range(2):
        database = Database(path)
        assert database.read("SELECT value FROM kept") == [("x",)]
        assert database.read("PRAGMA user_version") == [(1,)]
        database.close()


def test_a_full_disk_at_the_start_is_named(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(small_disk / "filler")
    with pytest.raises(DiskFullError, match=r"no space left on the disk of .*art\.db"):
        Database(small_disk / "art.db")
    assert art_server(["--data-dir", str(small_disk), "--port", "0"]) == 1
    shown = capsys.readouterr().err
    assert "art-server: no space left on the disk of" in shown
    assert "Traceback" not in shown
