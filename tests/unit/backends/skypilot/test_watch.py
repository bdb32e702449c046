"""The watch: it goes on while the server is used, and ends when it is idle or the money is spent."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art.backends.skypilot.copying import held
from art.backends.skypilot.watch import Watch

START = 1_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


def set_job(folder: Path, state: str, written_at: float) -> None:
    with contextlib.closing(sqlite3.connect(folder / "data" / "art.db")) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS jobs (job_id TEXT PRIMARY KEY, state TEXT)")
        db.execute("INSERT OR REPLACE INTO jobs VALUES ('one', ?)", [state])
    os.utime(folder / "data" / "art.db", (written_at, written_at))


def seen(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "watch.json").read_text())
    return content


def test_a_server_that_nobody_uses_is_idle_from_the_start_of_the_watch(folder: Path) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    assert watch.look(START + 599) is None
    assert seen(folder) == {"last_active_at": START, "ends_at": None, "ended": None}
    assert watch.look(START + 660) == "idle for 11 minutes"
    assert seen(folder)["ended"] == "idle for 11 minutes"


def test_each_recorded_answer_counts_as_use(folder: Path) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    set_job(folder, "succeeded", written_at=START + 500)
    assert watch.look(START + 1000) is None
    log = folder / "data" / "art.db-wal"
    log.touch()
    os.utime(log, (START + 900, START + 900))
    assert watch.look(START + 1400) is None
    assert watch.look(START + 1500) == "idle for 10 minutes"


@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
def test_a_job_that_is_not_finished_counts_as_use_however_long_it_takes(folder: Path, state: str) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    set_job(folder, state, written_at=START)
    assert watch.look(START + 50_000) is None
    assert seen(folder)["last_active_at"] == START + 50_000
    set_job(folder, "failed", written_at=START)
    assert watch.look(START + 50_599) is None, "its end counts as use too"
    assert watch.look(START + 50_600) is not None


def test_a_budget_ends_it_also_while_it_is_used(folder: Path) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    set_job(folder, "running", written_at=START)
    (folder / "limit.json").write_text(json.dumps({"ends_at": START + 100}))
    assert watch.look(START + 99) is None
    assert watch.look(START + 100) == "the budget is spent"


def test_a_database_that_cannot_be_read_for_a_while_does_not_end_a_job(folder: Path) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    set_job(folder, "running", written_at=START)
    assert watch.look(START + 50_000) is None
    (folder / "data" / "art.db").write_bytes(b"no database " * 100)
    os.utime(folder / "data" / "art.db", (START, START))
    assert watch.look(START + 50_500) is None
    assert watch.look(START + 50_600) is not None, "a damaged one does not keep the machine for ever"


def test_a_disk_that_is_full_does_not_end_the_watch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(folder, idle_s=600, started_at=START)
    (folder / ".watch.json.part").symlink_to("/dev/full")
    assert watch.look(START + 1) is None
    assert "No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"ends_at": "soon"}'])
def test_a_limit_that_cannot_be_read_is_none(folder: Path, content: str) -> None:
    (folder / "limit.json").write_text(content)
    assert Watch(folder, idle_s=600, started_at=START).look(START + 1) is None


def test_copies_are_made_as_often_as_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_job(folder, "succeeded", written_at=START)
    target = folder / "bucket"
    watch = Watch(folder, idle_s=600, copy_to=target, copy_every_s=60, started_at=START, copied_at=START)
    watch.copy_if_due(START + 59)
    assert not target.exists()
    watch.copy_if_due(START + 60)
    assert set(held(target)) == {"art.db"}
    watch.copy_if_due(START + 61)
    assert capsys.readouterr().out == f"copied 1 files to {target}\n"


def test_a_copy_that_fails_does_not_end_the_watch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_job(folder, "succeeded", written_at=START)
    (folder / "file").touch()
    Watch(folder, idle_s=600, copy_to=folder / "file" / "copy", started_at=START).copy_if_due(START)
    assert "copying to" in capsys.readouterr().out


def test_when_it_ends_the_server_is_stopped_and_a_last_copy_is_made(folder: Path) -> None:
    set_job(folder, "succeeded", written_at=START)
    (folder / "keeper.py").write_text(f"import sys; open({str(folder / 'stopped')!r}, 'w').write(sys.argv[1])")
    done = subprocess.run(
        [sys.executable, "-m", "art.backends.skypilot.watch", str(folder), "--idle-minutes", "0", "--poll-s", "0",
         "--copy-to", str(folder / "bucket")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "stopped").read_text() == "stop"
    assert set(held(folder / "bucket")) == {"art.db"}
    assert "stopping the server" in done.stdout
