"""Scripts that use `art.RayWorkers`: what they define runs in workers, and nothing of them is left when they end."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from art.errors import ConfigError
from art.rollout_workers import Call
from art_cluster import packed_calls
from art_cluster.ray_workers import RayWorkers
from tests.support import worker_rollouts

HAS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install 'agent-reinforcement-trainer[cluster]'",
)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-reinforcement-trainer\[cluster\]'"):
        RayWorkers(1)


SCRIPT = """
import asyncio
from dataclasses import dataclass
import art

@dataclass
class Scenario:
    number: int

class Reply(art.Trajectory):
    extra: int = 0

class OwnError(Exception):
    pass

async def rollout(scenario):
    if scenario.number == 2:
        raise OwnError("two")
    assert isinstance(scenario, Scenario)
    return Reply(reward=scenario.number, extra=7)

async def main():
    async with art.RayWorkers(1, cpus=0.5) as workers:
        one, two = await art.gather_trajectories(
            [rollout(Scenario(n)) for n in (1, 2)], workers=workers, max_exceptions=1, pbar_desc=None
        )
    assert type(one) is Reply and one.extra == 7 and type(two) is OwnError, (one, two)
    print("done")

"""


@HAS_RAY
@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [True, False])
def test_what_a_script_defines_runs_in_workers_if_its_main_part_is_guarded(tmp_path: Path, is_guarded: bool) -> None:
    script = tmp_path / "train.py"
    guard = 'if __name__ == "__main__":\n    ' if is_guarded else ""
    script.write_text(f"{SCRIPT}{guard}asyncio.run(main())\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    if is_guarded:
        assert ended.returncode == 0, ended.stderr
        assert "done" in ended.stdout
    else:
        assert 'put what starts the training under `if __name__ == "__main__":`' in ended.stderr


@HAS_RAY
@pytest.mark.slow
def test_no_cluster_at_the_address_is_told_within_ten_seconds(tmp_path: Path) -> None:
    source = (
        "import art, asyncio\nfrom tests.support.worker_rollouts import length\n"
        "asyncio.run(art.RayWorkers(1, address='ADDRESS').run(length, 'a'))"
    )
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "auto"):
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", source.replace("ADDRESS", address)], capture_output=True, text=True, timeout=60,
            env=os.environ | {"RAY_TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert "no Ray cluster answers at" in ended.stderr
        assert time.monotonic() - began < 10 + 5, "with the start of Python"


@HAS_RAY
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_script_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.DEVNULL) as run:
        wait_until(lambda: len(worker_rollouts.logged(tmp_path, "pids")) == 2)
        pids = [
            *map(int, worker_rollouts.logged(tmp_path, "pids")),
            *(child.pid for child in psutil.Process(run.pid).children()),
        ]
        assert len(pids) >= 4, "two workers, and the processes of Ray"
        run.send_signal(number)
        wait_until(lambda: not any(map(is_running, pids)))


HANGING = """
import asyncio, os, sys
from pathlib import Path
import art

async def rollout(folder):
    with (folder / "pids.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    await asyncio.sleep(600)

async def main():
    workers = art.RayWorkers(2, cpus=0.1, concurrency=1)
    await art.gather_trajectories([rollout(Path(sys.argv[1])) for _ in range(2)], workers=workers, pbar_desc=None)

if __name__ == "__main__":
    asyncio.run(main())
"""


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_script_travels_for_what_it_defines_not_for_texts_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    script = packed_calls.Script(path="here.py", source="", package=None)
    monkeypatch.setattr(packed_calls, "read_script", lambda: script)
    text = pack_call('def f(): ...\nif __name__ == "__main__":\n    f()')
    defined = type("Defined", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Defined", defined, raising=False)
    assert [text, pack_call(defined)] == [None, script]


def pack_call(argument: object) -> packed_calls.Script | None:
    """The script that travels with a call that has an argument."""
    call = Call(worker_rollouts.chat, (argument,), {})
    script: packed_calls.Script | None = pickle.loads(packed_calls.pack(call).payload)[0]
    return script
