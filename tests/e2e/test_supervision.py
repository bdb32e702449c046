"""Processes that stand still, end, or are asked how they stand: seen from a user's script and a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art.cli import main as art_command
from art.config import ServerConfig
from art.local_backend import PINGS_PER_TIMEOUT
from tests.support.processes import children_of, wait_until_gone

PROMPT = {"role": "user", "content": "say yes, no or maybe"}
END_WITHIN_S = 30.0
SLOW = pytest.mark.slow

SCRIPT = """
import asyncio, art
from art.config import TrainerConfig

async def main():
    async with art.LocalBackend(path={path!r}) as backend:
        settings = art.ModelSettings(trainer=TrainerConfig(num_processes={num_processes}, device="cpu"))
        model = art.TrainableModel(name="agent", project="p", base_model={model!r}, base_path={path!r}, settings=settings)
        await model.register(backend)
        print(backend.server_pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def start_script(tiny_model: Path, path: Path, *, num_processes: int = 1) -> tuple[subprocess.Popen[str], list[int]]:
    """A user's script that serves a model, and all processes that it has led to."""
    text = SCRIPT.format(path=str(path), model=str(tiny_model), num_processes=num_processes)
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert script.stdout is not None
    server = int(script.stdout.readline())
    (warm_parent,) = children_of(server)
    children = children_of(warm_parent)
    return script, [server, warm_parent, *children, *(pid for child in children for pid in children_of(child))]


@pytest.fixture(params=[1, pytest.param(2, marks=SLOW)])
def num_processes(request: pytest.FixtureRequest) -> int:
    """Of the trainer. Those beyond the first are grandchildren of the server."""
    return int(request.param)


# A script has no handler of its own for SIGTERM, which ends it as SIGKILL does.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW), signal.SIGKILL])
def test_everything_ends_with_the_script(
    number: signal.Signals, num_processes: int, tiny_model: Path, tmp_path: Path
) -> None:
    script, pids = start_script(tiny_model, tmp_path, num_processes=num_processes)
    assert len(pids) == 3 + num_processes
    if number == signal.SIGINT:
        os.killpg(script.pid, number)  # as Ctrl-C in a terminal, which reaches all processes of the group
    else:
        script.send_signal(number)
    wait_until_gone([*pids], within_s=END_WITHIN_S)
    _, complaints = script.communicate(timeout=END_WITHIN_S)
    assert script.returncode == -number
    if number == signal.SIGINT:
        assert complaints.splitlines()[-1:] == ["stopped at step 0; run the same script again and it goes on"]
        assert "Traceback" not in complaints


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "trainer"])
def test_the_children_of_a_killed_process_end_too(victim: str, tiny_model: Path, tmp_path: Path) -> None:
    script, (server, warm_parent, engine, trainer, member) = start_script(tiny_model, tmp_path, num_processes=2)
    doomed = [server, warm_parent, engine, trainer, member] if victim == "server" else [trainer, member]
    os.kill(doomed[0], signal.SIGKILL)
    wait_until_gone(doomed, within_s=END_WITHIN_S)
    script.terminate()
    script.wait(END_WITHIN_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An `art-server` started by hand."""
    process = subprocess.Popen(
        [sys.executable, "-m", "art.cli.server", "--port", "0", "--data-dir", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"ART_API_KEY": "the-key"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run with nohup
    )  # fmt: skip
    assert process.stdout is not None
    assert "listens on" in process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGHUP])
def test_a_server_started_by_hand_ends_when_asked(number: signal.Signals, server: subprocess.Popen[str]) -> None:
    server.send_signal(number)
    assert server.wait(END_WITHIN_S) == 0


def test_status_of_a_server_that_answers_stands_still_and_goes_on(
    server: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_API_KEY", "the-key")
    assert art_command.main(["status", "--data-dir", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert "art-server at http://127.0.0.1:" in report
    assert "Jobs that have not ended\n  none" in report
    with monkeypatch.context() as patch:
        patch.setattr("art.cli.status.REPORT_TIMEOUT_S", 0.5)
        server.send_signal(signal.SIGSTOP)
        assert art_command.main(["status", "--data-dir", str(tmp_path)]) == 1
    assert f"art-server (pid {server.pid}) gave no answer within" in capsys.readouterr().err
    server.send_signal(signal.SIGCONT)
    monkeypatch.setattr("art.cli.status.REPORT_TIMEOUT_S", 30.0)
    assert art_command.main(["status", "--data-dir", str(tmp_path)]) == 0
    server.send_signal(signal.SIGTERM)
    assert server.wait(END_WITHIN_S) == 0


def test_status_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert art_command.main(["status", "--data-dir", str(tmp_path)]) == 1
    assert f"no art-server has ever run on {tmp_path}" in capsys.readouterr().err


async def pids_of(backend: art.LocalBackend) -> dict[str, int]:
    health = await (await backend.open()).health()
    assert backend.server_pid is not None
    kinds = {kind: health["base_models"][0][kind]["pid"] for kind in ("engine", "trainer")}
    return {"server": backend.server_pid, **kinds}


HELD_START = """
import os, sys, time
while "art.cli.server" in sys.orig_argv and os.getppid() == {parent} and os.path.exists({hold!r}):
    time.sleep(0.01)
"""


async def test_a_restarted_server_may_take_longer_to_start_than_the_heartbeat_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a busy machine kills each restarted server at its start, until the backend gives up."""
    hold = tmp_path / "hold"
    (tmp_path / "sitecustomize.py").write_text(HELD_START.format(hold=str(hold), parent=os.getpid()))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = ServerConfig(heartbeat_timeout_s=2.0)
    async with art.LocalBackend(path=tmp_path / "data", server_config=config, show_page=False) as backend:
        client = await backend.open()
        ask, missed = client.health, asyncio.Semaphore(0)

        async def counted() -> dict[str, object]:
            try:
                return await ask()
            except asyncio.CancelledError:
                missed.release()
                raise

        monkeypatch.setattr(client, "health", counted)
        hold.touch()
        assert backend.server_pid is not None
        os.kill(backend.server_pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            for _ in range(PINGS_PER_TIMEOUT + 2):
                await missed.acquire()
            hold.unlink()
            await ask()
    assert caplog.text.count("art-server died") == 1


@SLOW
@pytest.mark.parametrize("stopped", ["engine", "trainer", "server"])
async def test_a_process_that_is_stopped_is_ended_and_work_goes_on(
    stopped: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(heartbeat_timeout_s=4.0)
    async with art.LocalBackend(path=tmp_path, server_config=config) as backend:
        model = art.TrainableModel(name="agent", project="p", base_model=str(tiny_model), base_path=str(tmp_path))
        await model.register(backend)

        async def rollout(i: int) -> art.Trajectory:
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=[PROMPT], seed=i, max_completion_tokens=8
            )
            return art.Trajectory(messages_and_choices=[PROMPT, completion.choices[0]], reward=i % 2)

        os.kill((await pids_of(backend))[stopped], signal.SIGSTOP)
        async with asyncio.timeout(300):
            groups = [art.TrajectoryGroup(rollout(i) for i in range(4))]
            result = await backend.train(model, await art.gather_trajectory_groups(groups, pbar_desc=None))
            health = await (await backend.open()).health()
    assert result.step == 1
    if stopped == "server":
        assert "art-server died (signal 9, SIGKILL; it gave no answer for 4 s and was killed)" in caplog.text
    else:
        assert "was silent for" in health["base_models"][0][stopped]["last_end"]
