"""`HomeCopy`: data of another machine comes here and goes there, whatever its shell prints and wherever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art.backends.skypilot import copying, home
from art.backends.skypilot.home import HomeCopy
from art.backends.ssh import Ssh
from art.errors import DiskFullError, MachineError, StorageError, UnreachableError
from tests.support.fake_ssh import FakeMachine

NAME = "shop/models/agent/checkpoints/0001/adapter.safetensors"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    set_python(machine, f'PYTHONPATH={Path(art.__file__).parents[1]} exec {sys.executable} "$@"')
    data = machine.server_folder / "data"
    (data / NAME).parent.mkdir(parents=True)
    (data / NAME).write_bytes(b"x" * 300_000)
    with contextlib.closing(sqlite3.connect(data / "art.db")) as db:
        db.execute("CREATE TABLE published (step)")
    yield machine
    machine.kill()


def set_python(machine: FakeMachine, script: str) -> None:
    machine.python.write_text(f"#!/bin/sh\n{script}\n")


@pytest.fixture
def copy(machine: FakeMachine, tmp_path: Path) -> HomeCopy:
    return HomeCopy(Ssh("box"), "~/.art/servers/default", tmp_path / "copy")


async def test_a_shell_that_prints_when_it_starts_is_no_obstacle(machine: FakeMachine, copy: HomeCopy) -> None:
    machine.set_shell("printf 'welcome\\n\\377'; echo 'be careful' >&2")
    assert await copy.pull() == 2
    data = machine.server_folder / "data"
    data.rename(machine.home / "lost")
    assert await copy.push() == 2
    assert (data / NAME).read_bytes() == b"x" * 300_000


async def test_the_login_shell_need_not_know_the_syntax_of_sh(machine: FakeMachine, copy: HomeCopy) -> None:
    machine.set_foreign_shell()
    assert await copy.pull() == 2


async def test_a_full_disk_here_is_told_whatever_the_shell_prints(machine: FakeMachine, copy: HomeCopy) -> None:
    machine.set_shell("echo 'be careful' >&2")
    part = copy.target / NAME
    part.parent.mkdir(parents=True)
    part.with_name(f".{part.name}.part").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="copying to"):
        await copy.pull()
    assert list(part.parent.iterdir()) == [], "the part needs the space"
    assert await copy.pull() == 2


@pytest.mark.parametrize(
    ("said", "kind", "advice"),
    [
        ("Host key verification failed.", MachineError, "Connect once in a terminal"),
        ("ssh: connect to host box port 22: Connection refused", UnreachableError, "does `ssh box` work"),
    ],
)
async def test_a_connection_that_fails_says_what_to_do(
    machine: FakeMachine, copy: HomeCopy, said: str, kind: type[Exception], advice: str
) -> None:
    await copy.pull()
    machine.set_problem(said)
    for act in (copy.pull, copy.push):
        with pytest.raises(kind, match=advice):
            await act()


async def test_a_program_over_there_that_ends_early_says_why(machine: FakeMachine, copy: HomeCopy) -> None:
    await copy.pull()
    set_python(machine, "head -c 100000 > /dev/null; echo 'No space left on device' >&2; exit 1")
    for act in (copy.pull, copy.push):
        with pytest.raises(MachineError, match=r"copying the data of box failed: No space left on device"):
            await act()


async def test_a_program_over_there_that_hangs_is_given_up(
    machine: FakeMachine, copy: HomeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "STALL_S", 0.2)
    monkeypatch.setattr(home, "_LOOK_S", 0.05)
    set_python(machine, "exec sleep 600")
    with pytest.raises(MachineError, match=r"nothing has come or gone for 0 s"):
        await copy.pull()


async def test_a_cancelled_copy_leaves_no_process(machine: FakeMachine, copy: HomeCopy) -> None:
    set_python(machine, f"exec {machine.folder}/hang")
    (machine.folder / "hang").write_text("#!/bin/sh\nwhile :; do sleep 1; done\n")
    (machine.folder / "hang").chmod(0o755)
    running = asyncio.create_task(copy.pull())
    async with asyncio.timeout(60):
        while not machine.processes("hang"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while machine.processes():
            await asyncio.sleep(0.01)


async def test_two_copies_at_once_wait_for_each_other(
    machine: FakeMachine, copy: HomeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(await asyncio.gather(copy.pull(), copy.pull())) == [0, 2]
    monkeypatch.setattr(copying, "LOCK_WAIT_S", 0.0)
    with (
        copying.only_copy(copy.target),
        pytest.raises(StorageError, match="another program has been copying"),
    ):
        await copy.pull()
