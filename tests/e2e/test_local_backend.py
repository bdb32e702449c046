"""`LocalBackend` and `art-server` as processes: event loops that end, servers that die, Ctrl-C, a second backend."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
import art.backends.local
from art.backends import local
from art.errors import ConfigError, ProcessError

PROMPT = {"role": "user", "content": "say yes, no or maybe"}


def kill_server(backend: art.LocalBackend) -> None:
    assert backend.server_pid is not None
    os.kill(backend.server_pid, signal.SIGKILL)


async def health(backend: art.LocalBackend) -> dict:
    return await (await backend._connection()).health()


def test_one_backend_in_several_event_loops_also_when_its_server_dies_between_them(tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path)
    backend.start()  # it starts while this process does other work
    started = backend.server_pid

    async def use() -> int | None:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(health(backend) for _ in range(3)))
        assert [answer["status"] for answer in answers] == ["ok"] * 3
        return backend.server_pid

    first = asyncio.run(use())
    assert asyncio.run(use()) == first == started
    kill_server(backend)
    assert asyncio.run(use()) not in (first, None)
    asyncio.run(backend.close())
    assert backend.server_pid is None
    assert asyncio.run(use()) is not None  # and opened again
    asyncio.run(backend.close())


async def test_a_second_backend_on_the_same_data_is_refused_by_name(tmp_path: Path) -> None:
    async with art.LocalBackend(path=tmp_path) as first:
        await health(first)
        second = art.LocalBackend(path=tmp_path)
        with pytest.raises(ProcessError, match=rf"in use by another art-server \(pid {first.server_pid}\)"):
            await health(second)
        assert (await health(first))["status"] == "ok"
    async with second:
        assert (await health(second))["status"] == "ok"


@pytest.mark.parametrize("below", ["", "data"])
def test_a_file_in_the_place_of_the_data_directory_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"LocalBackend\(path=.*notes.txt.* is a file; give a folder"):
        art.LocalBackend(path=file / below)
    assert file.read_text() == "mine"


async def test_a_server_killed_while_it_starts_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with art.LocalBackend(path=tmp_path) as backend:
        asking = asyncio.ensure_future(health(backend))
        while backend.server_pid is None:
            await asyncio.sleep(0.01)
        kill_server(backend)
        assert (await asking)["status"] == "ok"
    assert "art-server died at its start (signal 9, SIGKILL): starting it again" in caplog.text


async def test_closing_ends_calls_under_way(tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path)
    client = await backend._connection()
    os.kill(backend.server_pid or 0, signal.SIGSTOP)  # accepts, and never answers
    call = asyncio.ensure_future(client.health())
    await asyncio.sleep(0.2)
    kill_server(backend)
    await backend.close()
    async with asyncio.timeout(60):
        with pytest.raises(ProcessError, match="the connection was closed"):
            await call


async def test_a_server_that_dies_again_and_again_is_given_up_on_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTARTS_PER_MINUTE", 0)
    async with art.LocalBackend(path=tmp_path) as backend:
        client = await backend._connection()
        os.kill(backend.server_pid or 0, signal.SIGSTOP)  # accepts, and never answers
        under_way = asyncio.ensure_future(client.health())
        await asyncio.sleep(0.2)
        kill_server(backend)
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
        await backend._connection()
        print(backend.server_pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An `art-server` started by hand, somewhere else."""
    process = subprocess.Popen(
        [sys.executable, "-m", "art.cli.server", "--port", "0", "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | {"ART_API_KEY": "the-key"},
    )  # fmt: skip
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    yield found[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


async def test_a_server_started_by_hand_trains_for_a_client_in_another_directory(
    server: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    async with art.Backend(server, "the-key") as backend:
        model = art.TrainableModel(
            name="agent", project="hand", base_model=f"./{tiny_model.name}", base_path=str(tmp_path / "log")
        )
        await model.register(backend)

        async def rollout(i: int) -> art.Trajectory:
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=[PROMPT], seed=i, max_completion_tokens=8
            )
            return art.Trajectory(messages_and_choices=[PROMPT, completion.choices[0]], reward=i % 2)

        groups = await art.gather_trajectory_groups([art.TrajectoryGroup(rollout(i) for i in range(4))], pbar_desc=None)
        result = await model.train(groups)
        assert result.step == 1
        # The same model by its whole path is the same model.
        same = art.TrainableModel(name="agent", project="hand", base_model=str(tiny_model))
        await same.register(backend)
        assert await same.get_step() == 1
    assert (tmp_path / "log" / "hand" / "models" / "agent" / "history.jsonl").exists()


def test_a_plain_with_block_around_event_loops_of_the_users_own(tmp_path: Path) -> None:
    with art.LocalBackend(path=tmp_path, in_process=True) as backend:
        assert asyncio.run(health(backend))["status"] == "ok"
        pid = backend.server_pid
        assert pid is not None
        assert asyncio.run(health(backend))["status"] == "ok"
        assert backend.server_pid == pid
    assert not _runs(pid)
    assert backend.server_pid is None


async def test_a_plain_with_block_inside_a_running_loop_as_notebooks_have_one(tmp_path: Path) -> None:
    with art.LocalBackend(path=tmp_path) as backend:
        client = await backend._connection()
        assert (await client.health())["status"] == "ok"
        pid = backend.server_pid
        assert pid is not None
    assert not _runs(pid), "when the block is over, so is the server"
    async with asyncio.timeout(60):
        while [task for task in asyncio.all_tasks() if task.get_name().startswith("local-backend")]:
            await asyncio.sleep(0.01)
    with backend:
        assert (await health(backend))["status"] == "ok"
        assert backend.server_pid not in (None, pid)
