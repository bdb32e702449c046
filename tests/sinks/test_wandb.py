"""W&B over the network, against a stand-in for its server, and `wandb sync` of offline runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.sinks import Run
from tests.sinks.fake_wandb import FakeWandb, fake_wandb
from tests.sinks.readers import model_folder

pytest.importorskip("wandb", reason="wandb is not installed; `make test-sinks` installs it")
pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeWandb]:
    with fake_wandb() as server:
        yield server


def run(server: FakeWandb, folder: Path, first: int, last: int, end: str, mode: str = "online") -> None:
    variables = os.environ | server.environment() | {"WANDB_MODE": mode, "HOME": str(folder)}
    command = [sys.executable, str(PROGRAM), str(folder), "wandb", str(first), str(last), end]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    assert "must be monotonically increasing" not in done.stderr, "no row is sent that W&B has"


def check(server: FakeWandb, num_steps: int) -> None:
    assert server.overwritten == []
    assert list(server.histories) == [Run(project="games", name="agent", folder=Path()).id]
    assert server.points("val/reward") == [(step, pytest.approx(step / 10)) for step in range(num_steps)]
    assert server.points("loss/train") == [(step, pytest.approx(1 / (step + 1))) for step in range(num_steps)]


def test_killed_and_resumed_runs_are_one_line(tmp_path: Path, server: FakeWandb) -> None:
    run(server, tmp_path, 0, 2, "close")
    run(server, tmp_path, 2, 4, "kill")
    run(server, tmp_path, 4, 5, "close")
    check(server, 5)


def test_a_run_goes_on_where_the_log_was_lost(tmp_path: Path, server: FakeWandb) -> None:
    """A container that trains by a remote server keeps no log; W&B then has the only copy of the first rows."""
    for name, first in (("first", 0), ("second", 2)):
        (tmp_path / name).mkdir()
        run(server, tmp_path / name, first, first + 2, "close")
    check(server, 4)


def test_offline_runs_are_one_line_after_sync(tmp_path: Path, server: FakeWandb) -> None:
    run(server, tmp_path, 0, 2, "close", "offline")
    run(server, tmp_path, 2, 3, "kill", "offline")  # nothing of it is in wandb's file yet
    run(server, tmp_path, 3, 60, "kill", "offline")  # a part of it is
    run(server, tmp_path, 60, 61, "close", "offline")
    files = model_folder(tmp_path) / "sinks" / "wandb"
    sync = [str(Path(sys.executable).with_name("wandb")), "sync", "--yes", *map(str, files.glob("offline-run-*"))]
    variables = os.environ | server.environment() | {"HOME": str(tmp_path)}
    done = subprocess.run(sync, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    check(server, 61)
