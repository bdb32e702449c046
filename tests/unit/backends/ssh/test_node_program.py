"""The program on each machine: keys that are let in and out, variables, and processes that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art.backends.ssh import node_program

MINE = "ssh-ed25519 AAAAmine alice\r\n# a comment"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder; the home directory has a file of keys behind a link, as dotfiles have."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(node_program, "host_keys", lambda *_: ["ssh-ed25519 AAAAhost"])
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "dotfiles" / "keys").write_bytes(MINE.encode())
    (tmp_path / "dotfiles" / "keys").chmod(0o640)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "authorized_keys").symlink_to(tmp_path / "dotfiles" / "keys")
    (tmp_path / "server").mkdir()
    return tmp_path / "server"


def present(folder: Path) -> str:
    return (folder.parent / "dotfiles" / "keys").read_bytes().decode()


def test_a_key_is_let_in_once_and_out_without_a_trace(folder: Path) -> None:
    for public in ("ssh-ed25519 AAAAold x", "ssh-ed25519 AAAAnew x", "ssh-ed25519 AAAAnew x"):
        node_program.admit(folder, public)
        assert present(folder) == f"{MINE}\nrestrict {public}\n"
    assert node_program.look(folder)["is_admitted"] is True
    file = folder.parent / ".ssh" / "authorized_keys"
    assert file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    node_program.leave(folder)
    assert present(folder) == f"{MINE}\n"
    assert node_program.look(folder)["is_admitted"] is False
    node_program.leave(folder)
    assert present(folder) == f"{MINE}\n"


def test_an_account_without_keys_gets_a_private_file(folder: Path) -> None:
    file = folder.parent / ".ssh" / "authorized_keys"
    file.unlink()
    file.parent.rmdir()
    old = os.umask(0o077)  # as `run` sets it
    try:
        answer = node_program.admit(folder, "ssh-ed25519 AAAA x")
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]
    assert answer["python"] == str(folder / "venv" / "bin" / "python")


def test_variables_reach_the_trainer_and_no_list_of_processes(folder: Path) -> None:
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / "environment.json").write_text(json.dumps({"HF_TOKEN": "hf_secret's"}))
    python = node_program.admit(folder, "ssh-ed25519 AAAA x")["python"]
    show = "import os; print(os.environ['HF_TOKEN'], open('/proc/self/cmdline').read())"
    printed = subprocess.run([python, "-c", show, "more"], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("hf_secret's ")
    assert printed.count("hf_secret") == 1
    assert "more" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_process_of_the_trainer_that_is_left_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_program, "END_S", 0.0)
    python = str(folder / "venv" / "bin" / "python")

    def start(*words: str) -> subprocess.Popen[bytes]:
        script = "print(flush=True); import sys; sys.stdin.read()"
        pipe = subprocess.PIPE
        process = subprocess.Popen([python, "-c", script, *words], executable=sys.executable, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    with start("art.runtime.children.trainer_team") as trainer, start("another") as other:
        assert node_program.look(folder)["num_processes"] == 1
        (pid,) = node_program.trainer_processes(folder)
        assert pid == trainer.pid
        monkeypatch.setattr(node_program, "trainer_processes", lambda _: [pid] if trainer.poll() is None else [])
        node_program.end(folder)
        assert trainer.wait() == -9
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Permission denied (publickey).", "must accept keys and read ~/.ssh/authorized_keys"),
        ("Host key verification failed.", "another machine than gpu2 answers at this address; if gpu1 reaches it"),
        ("connect to host 10.0.0.2 port 22: Connection timed out", "name the node as gpu2=ADDRESS or =ADDRESS:PORT"),
    ],
)
def test_a_login_that_fails_is_explained(said: str, advice: str) -> None:
    node: dict[str, Any] = {"name": "gpu2", "user": "alice", "host": "10.0.0.2", "port": 22}
    command = ["sh", "-c", f"echo '{said}' >&2; exit 255"]
    message = node_program.no_login("gpu1", node, node_program.start(command))
    assert message.startswith(f"gpu1 cannot log in to gpu2 (alice@10.0.0.2 port 22): {said}; ")
    assert advice in message


def test_what_is_missing_on_the_first_machine_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(node_program.Refused, match="there is no `ssh`, which starts processes on the other machines"):
        node_program.make_key(folder)
