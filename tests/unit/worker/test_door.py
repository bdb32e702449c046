"""Workers dial in: who is let in, who is refused, and what a child notices of being on another machine (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from art.config import ServerConfig
from art.errors import ConfigError, InvalidRequestError, ProcessError
from art.protocol.calls import InitCheckpoint
from art.protocol.rpc import RpcClient
from art.worker import door as doors
from art.worker.agent import WorkerAgent
from art.worker.door import DoorLauncher, WorkerDoor
from art.worker.launch import Process, Program
from art.worker.process import ChildProcess, ChildSpec

KEY = "a key of workers, long enough"


@pytest_asyncio.fixture
async def door() -> AsyncIterator[WorkerDoor]:
    door = WorkerDoor(KEY)
    await door.open("127.0.0.1", 0)
    yield door
    await door.close()


@contextlib.asynccontextmanager
async def agent(door: WorkerDoor, folder: Path, key: str = KEY, kind: str = "trainer") -> AsyncIterator[asyncio.Task]:
    worker = WorkerAgent(kind, f"127.0.0.1:{door.port}", key, log_dir=folder)  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def trainer_of(door: WorkerDoor, tmp_path: Path, *, asks: bool = False) -> ChildProcess:
    async def initialise(client: RpcClient) -> None:
        if asks:
            await client.call(InitCheckpoint(path=tmp_path / "0", lora=None))

    spec = ChildSpec(
        name="trainer of test",
        module="art.worker.trainer_child",
        log_path=tmp_path / "logs" / "trainer.log",
        num_threads=1,
        config=ServerConfig(),
        launcher=DoorLauncher(door, "trainer", tmp_path / "samples"),
        first_pause_s=0.05,
    )
    return ChildProcess(spec, initialise)


async def test_a_child_on_a_worker_is_called_ended_and_started_again(door: WorkerDoor, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    child = trainer_of(door, tmp_path)
    async with agent(door, tmp_path):
        client = await child.connect()
        with pytest.raises(InvalidRequestError, match="no model yet"):  # the answer of the trainer's own process
            await client.call(InitCheckpoint(path=tmp_path / "0", lora=None))
        assert [one["state"] for one in door.status()] == ["working"]
        await child.end("the test wants it")
        async with asyncio.timeout(30):
            while child.live_client in (None, client):
                await asyncio.sleep(0.05)
        assert child.num_restarts == 1
        assert "the test wants it and was killed" in child.status["last_end"]
        assert not list((tmp_path / "samples").iterdir())
        await child.close()


async def test_the_last_lines_of_a_child_come_with_its_end(door: WorkerDoor, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    child = trainer_of(door, tmp_path)
    async with agent(door, tmp_path):
        client = await child.connect()
        with pytest.raises(InvalidRequestError):
            await client.call(InitCheckpoint(path=tmp_path / "0", lora=None))
        client.control(worker="signal", number=int(signal.SIGABRT))  # the child writes its stack before it ends
        async with asyncio.timeout(30):
            await client.ended.wait()
            while child.num_restarts == 0:
                await asyncio.sleep(0.05)
        assert "signal 6, SIGABRT" in child.status["last_end"]
        assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "trainer.log").read_text()
        await child.close()


async def test_a_worker_that_is_gone_is_counted_and_another_takes_its_place(door: WorkerDoor, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    child = trainer_of(door, tmp_path)
    async with agent(door, tmp_path / "a"):
        first = await child.connect()
    await first.ended.wait()  # its machine has left
    async with agent(door, tmp_path / "b"):
        assert await child.connect() is not first
        assert "exit status 255" in child.status["last_end"]
        assert door.num_lost == 1
        await child.close()


async def test_a_worker_with_another_key_does_not_stay(door: WorkerDoor, tmp_path: Path) -> None:
    async with agent(door, tmp_path, "another key of workers, long enough") as task:
        with pytest.raises(ConfigError, match="does not have the worker key"):  # the worker is the first to notice
            await task
    assert door.status() == []


async def test_a_door_notices_a_worker_with_another_key_itself(
    door: WorkerDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(key: str, role: str, nonce: str, certificate: bytes) -> str:  # a worker that believes any door
        return doors.prove(KEY if role == "door" else key, role, nonce, certificate)  # type: ignore[arg-type]

    monkeypatch.setattr("art.worker.agent.prove", prove)
    async with agent(door, tmp_path, "another key of workers, long enough") as task:
        with pytest.raises(ConfigError, match="the worker key is not the server's"):
            async with asyncio.timeout(10):
                await task
    assert door.status() == []


async def test_another_version_is_refused_by_name(
    door: WorkerDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art.worker.agent.own_versions", lambda: doors.own_versions() | {"torch": "1.0"})
    async with agent(door, tmp_path) as task:
        with pytest.raises(ConfigError, match=r"torch 1\.0 there and [\d.]+ here"):
            await task


async def test_nobody_comes(door: WorkerDoor, tmp_path: Path) -> None:
    async with agent(door, tmp_path, kind="engine"):
        with pytest.raises(ProcessError, match="no trainer worker has come within 1 s; waiting are: engine worker"):
            await door.take("trainer", None, 1.0)


async def test_a_caller_that_is_cancelled_while_it_takes_a_worker_leaves_it_to_the_next(
    door: WorkerDoor, tmp_path: Path
) -> None:
    async with agent(door, tmp_path):
        async with asyncio.timeout(20):
            while not door.status():
                await asyncio.sleep(0.01)
            for num_turns in range(5):  # one of these comes after the worker was chosen and before it is handed over
                taking = asyncio.create_task(door.take("trainer", None, 10.0))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                if taking.cancel():
                    with pytest.raises(asyncio.CancelledError):
                        await taking
            assert (await door.take("trainer", None, 10.0)).kind == "trainer"


async def test_a_worker_that_does_not_see_the_data_directory_says_so(
    door: WorkerDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("art.worker.agent.Path", lambda path: Path("/somewhere/else") / Path(path).name)
    async with agent(door, tmp_path):
        child = trainer_of(door, tmp_path, asks=True)
        with pytest.raises(ProcessError, match="does not see the server's data directory"):
            await child.connect()
        await child.close()


class BreakingLauncher:
    """Loses the connection before it has handed the process over, as when a node dies while an actor starts."""

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        ours, theirs = socket.socketpair()
        await client.connect(ours)
        theirs.close()
        await client.ended.wait()
        await asyncio.sleep(0.1)
        return await asyncio.create_subprocess_exec("true")

    async def close(self) -> None:
        pass


async def test_a_connection_that_is_lost_while_a_child_is_started_is_an_error_at_once(
    door: WorkerDoor, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    spec = replace(trainer_of(door, tmp_path).spec, launcher=BreakingLauncher())

    async def initialise(client: RpcClient) -> None:
        await client.call(InitCheckpoint(path=tmp_path / "0", lora=None))

    child = ChildProcess(spec, initialise)
    async with asyncio.timeout(20):
        with pytest.raises(ProcessError, match="lost its connection while it was started"):
            await child.connect()
    await child.close()


async def test_a_stranger_is_turned_away(door: WorkerDoor) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    assert door.status() == []


def test_the_address_and_the_key_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT, like 10\.0\.0\.5:5001"):
        WorkerAgent("engine", "somewhere", KEY)
    monkeypatch.setitem(os.environ, doors.KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="at least 16"):
        doors.worker_key()
