"""`LocalBackend` and its `art-server`: event loops that end, servers that die, Ctrl-C, a second backend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import art
import art.local_backend
from art import local_backend as local
from art.client.client import ServerClient
from art.errors import ConfigError, ProcessError
from art.runtime.placement import find_devices
from tests.support.processes import children_of


def kill_server(backend: art.LocalBackend) -> None:
    assert backend.server_pid is not None
    os.kill(backend.server_pid, signal.SIGKILL)


async def health(backend: art.LocalBackend) -> dict:
    return await (await backend.open()).health()


def test_a_plain_with_block_around_several_event_loops_also_when_the_server_dies_between_them(tmp_path: Path) -> None:
    async def use() -> int | None:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(health(backend) for _ in range(3)))
        assert [answer["status"] for answer in answers] == ["ok"] * 3
        return backend.server_pid

    with art.LocalBackend(path=tmp_path, in_process=True) as backend:
        backend.start()  # it starts while this process does other work
        started = backend.server_pid
        first = asyncio.run(use())
        assert asyncio.run(use()) == first == started
        if sys.platform == "linux" and find_devices().default_kind == "cpu":
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(started or 0)]
            assert any(b"warm_parent" in command for command in commands), "what a first model needs"
        kill_server(backend)
        last = asyncio.run(use())
        assert last not in (first, None)
    assert not _runs(last)
    assert backend.server_pid is None


@pytest.mark.slow
async def test_a_second_backend_on_the_same_data_is_refused_by_name(tmp_path: Path) -> None:
    async with art.LocalBackend(path=tmp_path) as first:
        await health(first)
        second = art.LocalBackend(path=tmp_path)
        with pytest.raises(ProcessError, match=rf"in use by another art-server \(pid {first.server_pid}\)"):
            await health(second)
        assert (await health(first))["status"] == "ok"
    async with second:
        assert (await health(second))["status"] == "ok"


async def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "art.db").write_bytes(b"no database" * 100)
    with pytest.raises(
        ProcessError, match=r"ended at its start \(exit status 1\)(.|\n)*art\.db: file is not a database"
    ):
        await health(art.LocalBackend(path=tmp_path))


@pytest.mark.parametrize("below", ["", "data"])
def test_a_file_in_the_place_of_the_data_directory_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"LocalBackend\(path=.*notes.txt.* is a file; give a folder"):
        art.LocalBackend(path=file / below)
    assert file.read_text() == "mine"


async def test_a_plain_with_block_inside_a_running_loop_whose_server_is_killed_while_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Notebooks have such a loop. Once closed, the same backend is opened again, and closing it ends calls under way."""
    with art.LocalBackend(path=tmp_path) as backend:
        asking = asyncio.ensure_future(health(backend))
        while backend.server_pid is None:
            await asyncio.sleep(0.01)
        kill_server(backend)
        assert (await asking)["status"] == "ok"
        pid = backend.server_pid
        assert pid is not None
    assert "art-server died at its start (signal 9, SIGKILL): starting it again" in caplog.text
    assert not _runs(pid), "when the block is over, so is the server"
    async with asyncio.timeout(60):
        while [task for task in asyncio.all_tasks() if task.get_name().startswith("local-backend")]:
            await asyncio.sleep(0.01)

    client = await backend.open()
    assert (await client.health())["status"] == "ok"
    assert backend.server_pid not in (None, pid)
    call = await call_under_way(backend, client)
    await backend.close()
    assert backend.server_pid is None
    async with asyncio.timeout(60):
        with pytest.raises(ProcessError, match="the connection was closed"):
            await call


async def call_under_way(backend: art.LocalBackend, client: ServerClient) -> asyncio.Future[dict]:
    """A call whose server has accepted it and is killed before it answers."""
    os.kill(backend.server_pid or 0, signal.SIGSTOP)
    call = asyncio.ensure_future(client.health())
    await asyncio.sleep(0.2)
    kill_server(backend)
    return call


async def test_a_server_that_dies_again_and_again_is_given_up_on_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTARTS_PER_MINUTE", 0)
    async with art.LocalBackend(path=tmp_path) as backend:
        client = await backend.open()
        under_way = await call_under_way(backend, client)
        async with asyncio.timeout(60):
            with pytest.raises(
                ProcessError, match=r"/health got no answer: art-server died 1 times in a minute, the las"
            ):
                await under_way
            while backend._failure is None:
                await asyncio.sleep(0.02)
            with pytest.raises(ProcessError, match=r"is not restarted(.|\n)*art-server listens on"):
                await health(backend)
            waiting = asyncio.ensure_future(client.health())
            await asyncio.sleep(0.1)
            await client.close()
            with pytest.raises(ProcessError, match="closed"):
                await waiting


SCRIPT = """
import asyncio, art

async def main():
    async with art.LocalBackend(path={path!r}) as backend:
        await backend.open()
        print(backend.server_pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_ctrl_c_or_a_kill(number: signal.Signals, tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(path=str(tmp_path))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert script.stdout is not None
    assert script.stderr is not None
    pid = int(script.stdout.readline())
    script.send_signal(number)
    errors = script.stderr.read()
    assert script.wait(60) == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    deadline = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
