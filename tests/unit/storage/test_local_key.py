"""The key of a server on this machine is found by its user's clients while it runs, and by nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import art
from art.storage.local_key import find_local_key, left_for_clients


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ART_API_KEY", raising=False)
    return tmp_path


def test_the_key_is_shared_while_the_server_runs(state: Path) -> None:
    with left_for_clients(5000, "art-key"):
        (path,) = state.rglob("*.key")
        assert path.stat().st_mode & 0o777 == 0o600
        for host in ("localhost", "127.0.0.1", "[::1]"):
            assert find_local_key(f"http://{host}:5000") == "art-key"
        assert art.RemoteBackend("http://localhost:5000")._client.api_key == "art-key"
        assert art.RemoteBackend("http://localhost:5000", "mine")._client.api_key == "mine"
        for other in ("http://gpu-machine:5000", "http://localhost:5001", "http://localhost"):
            assert find_local_key(other) is None
    assert not list(state.rglob("*.key"))
    assert find_local_key("http://localhost:5000") is None


def test_a_key_file_that_others_can_read_is_not_used(state: Path) -> None:
    with left_for_clients(5000, "art-key"):
        (path,) = state.rglob("*.key")
        path.chmod(0o644)
        assert find_local_key("http://localhost:5000") is None


def test_a_killed_servers_file_is_replaced_and_a_successors_is_kept(state: Path) -> None:
    with left_for_clients(5000, "old"):
        with left_for_clients(5000, "new"):
            assert find_local_key("http://localhost:5000") == "new"
        assert find_local_key("http://localhost:5000") is None
        successor = left_for_clients(5000, "newer")
        successor.__enter__()
    assert find_local_key("http://localhost:5000") == "newer"


def test_the_server_runs_without_a_home_directory(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "file"))
    with left_for_clients(5000, "art-key"):
        assert find_local_key("http://localhost:5000") is None


def test_a_user_whom_the_system_does_not_know_shares_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with left_for_clients(5000, "key"):
        assert find_local_key("http://127.0.0.1:5000") is None
