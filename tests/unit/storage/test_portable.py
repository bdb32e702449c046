from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art.errors import InvalidRequestError
from art.storage import atomic, layout
from art.storage.layout import DataDir
from art.storage.lock import lock_holder, take_lock


@pytest.fixture
def ignores_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the file system took `Agent` and `agent` for one name, as those of macOS and Windows do."""

    def exists(path: Path) -> bool:
        return path.parent.is_dir() and path.name.lower() in {name.lower() for name in os.listdir(path.parent)}

    monkeypatch.setattr(Path, "exists", exists)


@pytest.mark.usefixtures("ignores_case")
def test_a_model_does_not_write_into_the_folder_of_another_spelling(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.model("games", "Agent").check_spelling()
    data.model("games", "Agent").root.mkdir(parents=True)
    data.model("games", "Agent").check_spelling()
    data.model("games", "agent-2").check_spelling()
    with pytest.raises(InvalidRequestError, match=r"`name` is 'agent', but .* has a folder 'Agent'"):
        data.model("games", "agent").check_spelling()
    with pytest.raises(InvalidRequestError, match=r"`project` is 'Games', but .* has a folder 'games'"):
        data.model("Games", "other").check_spelling()


def test_names_that_differ_in_case_are_two_where_the_file_system_says_so(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.model("games", "Agent").root.mkdir(parents=True)
    assert layout.other_spelling(tmp_path / "games") is None
    if not (tmp_path / "GAMES").exists():
        data.model("games", "agent").check_spelling()


def test_a_process_runs_until_it_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert atomic.is_running(process.pid)
    process.communicate(b"\n")
    assert not atomic.is_running(process.pid)
    assert atomic.is_running(1)


def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = take_lock(path)
    assert held is not None
    assert take_lock(path) is None
    os.close(held)
    assert lock_holder(path) is None
