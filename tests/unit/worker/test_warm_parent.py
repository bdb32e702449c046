"""Children that the warm parent forks: what they share with it, what they have of their own, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.config import ServerConfig
from art.errors import ProcessError
from art.protocol.rpc import RpcClient
from art.worker import launch
from art.worker.launch import LocalLauncher, WarmParent, child_environment
from art.worker.process import ChildProcess, ChildSpec
from art.worker.waits import waiting
from tests.support.calls import raw
from tests.support.processes import children_of, wait_until_gone

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the warm parent needs Linux")

CHILD = """
import os, sys
from art.worker.child import child_from_argv

def look():
    import numpy, random, torch
    return {
        "threads": torch.get_num_threads(), "torch": torch.__config__.parallel_info(),
        "draws": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
    }

def main():
    child = child_from_argv("echo")
    print("echo child started", file=sys.stderr, flush=True)
    while True:
        child.tick("idle")
        frame = child.read()
        if frame["method"] == "die":
            raise ValueError("out of luck")
        if frame["method"] == "leave":
            sys.exit(3)
        found = {"parent": os.getppid(), "variable": os.environ["OMP_NUM_THREADS"]}
        child.socket.reply(frame["id"], found | (look() if frame["method"] == "look" else {}))

if __name__ == "__main__":
    main()
"""
QUICK = """
import art.worker.warm_parent as warm_parent

warm_parent._import_all = lambda: None
warm_parent._adapt_libraries = lambda num_threads: None
warm_parent.main()
"""
"""A warm parent that imports nothing and adapts nothing."""
WARM = """
import importlib
import art.worker.warm_parent as warm_parent

warm_parent._import_all = lambda: importlib.import_module("torch")
warm_parent.main()
"""
"""A warm parent that imports only what a fork has to adapt."""
UNFIT = """
import threading, time
import art.worker.warm_parent as warm_parent

warm_parent._import_all = lambda: threading.Thread(target=time.sleep, args=[60], daemon=True).start()
warm_parent.main()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"echo_child": CHILD, "quick_warm": QUICK, "torch_warm": WARM, "unfit_warm": UNFIT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick(modules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(launch, "_WARM_MODULE", "quick_warm")
    return modules


async def start(client: RpcClient) -> None:
    await client.call(raw("start"))


@asynccontextmanager
async def children(path: Path, count: int = 1, **changes: Any) -> AsyncIterator[tuple[WarmParent, list[ChildProcess]]]:
    warm_parent, made = WarmParent(), []
    for number in range(count):
        spec = ChildSpec(
            name=f"echo {number}",
            module="echo_child",
            log_path=path / f"echo-{number}.log",
            num_threads=number + 1,
            config=ServerConfig(),
            first_pause_s=0.05,
            launcher=LocalLauncher(warm_parent),
            **changes,
        )
        made.append(ChildProcess(spec, start))
    try:
        yield warm_parent, made
    finally:
        await asyncio.gather(*(child.close() for child in made))
        await warm_parent.close()


async def ask(child: ChildProcess, method: str = "ask") -> dict[str, Any]:
    return dict(await (await child.connect()).call(raw(method)))


async def until_restarted(child: ChildProcess, restarts: int) -> str:
    """Wait until the child has ended once more than `restarts` times; return how."""
    async with asyncio.timeout(60):
        while child.num_restarts == restarts:
            await asyncio.sleep(0.01)
    return str(child.status["last_end"])


async def death(child: ChildProcess, method: str) -> str:
    """End the child with a call; return what the caller is told."""
    restarts = child.num_restarts
    with pytest.raises(ProcessError) as caught:
        await ask(child, method)
    await until_restarted(child, restarts)
    return caught.value.message


async def test_forks_have_their_own_threads_and_randomness_as_new_interpreters_have(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_WARM_MODULE", "torch_warm")
    async with children(modules, 2) as (_, made):
        first, second = await asyncio.gather(*(ask(child, "look") for child in made))
        assert first["parent"] == second["parent"] != os.getpid()
        assert (first["threads"], second["threads"]) == (1, 2)
        assert (first["variable"], second["variable"]) == ("1", "2")
        assert all(one != other for one, other in zip(first["draws"], second["draws"], strict=True))
    fresh = ChildProcess(replace(made[1].spec, launcher=LocalLauncher()), start)
    found = await ask(fresh, "look")
    await fresh.close()
    assert found["parent"] == os.getpid()
    assert found["torch"] == second["torch"]


async def test_one_that_was_started_before_forks_the_first_child(quick: Path) -> None:
    before = children_of(os.getpid())
    async with children(quick) as (warm_parent, (child,)):
        await warm_parent.start(child_environment(child.spec.num_threads, child.spec.variables))
        (started,) = set(children_of(os.getpid())) - set(before)
        assert (await ask(child))["parent"] == started


async def test_how_a_fork_died_is_told_and_the_next_one_is_forked_too(quick: Path) -> None:
    async with children(quick) as (_, (child,)):
        parent = (await ask(child))["parent"]
        raised = await death(child, "die")
        assert "exit status 1" in raised
        assert "ValueError: out of luck" in raised
        assert "exit status 3" in await death(child, "leave")
        await child.connect()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSEGV)
        assert "SIGSEGV" in await until_restarted(child, 2)
        assert (await ask(child))["parent"] == parent


async def test_a_killed_warm_parent_takes_its_forks_along_and_another_one_forks_them(quick: Path) -> None:
    async with children(quick, 2) as (_, made):
        parent = (await asyncio.gather(*(ask(child) for child in made)))[0]["parent"]
        before = [child.pid for child in made]
        os.kill(parent, signal.SIGKILL)
        await asyncio.gather(*(until_restarted(child, 0) for child in made))
        wait_until_gone([pid for pid in before if pid is not None])
        first, second = [one["parent"] for one in await asyncio.gather(*(ask(child) for child in made))]
        assert first == second
        assert first not in (parent, os.getpid())


def be_impatient_with(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only for a moment for an answer of a warm parent that is stopped, and gives none; longer for the next one."""

    def waits(what: str, limit_s: float) -> AbstractAsyncContextManager[None]:
        return waiting(what, 0.1 if f"the warm parent (pid {stopped})" in what else limit_s)

    monkeypatch.setattr(launch, "waiting", waits)
    monkeypatch.setattr(launch, "ABORT_TIMEOUT_S", 0.1)  # the end of a child is told by its parent


@pytest.mark.parametrize("killed", [signal.SIGKILL, None], ids=["killed", "hung"])
async def test_a_stopped_warm_parent_keeps_nobody_waiting(
    killed: signal.Signals | None, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither reports the end of a child nor forks another one. It is replaced, and all its children come back."""
    async with children(quick, 2) as (_, (child, other)):
        parent = (await ask(child))["parent"]
        await other.connect()
        assert child.pid is not None
        os.kill(parent, signal.SIGSTOP)
        be_impatient_with(parent, monkeypatch)
        if killed:
            os.kill(child.pid, killed)  # by somebody else
        else:
            await child.end("it hung")
        await asyncio.gather(*(until_restarted(one, 0) for one in (child, other)))
        first, second = [one["parent"] for one in await asyncio.gather(ask(child), ask(other))]
        assert first == second
        assert first not in (parent, os.getpid())
    wait_until_gone([parent])


@pytest.mark.parametrize("warm", ["no_such_module", "unfit_warm"])
async def test_without_a_fit_warm_parent_a_child_is_a_new_interpreter(
    warm: str, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_WARM_MODULE", warm)
    async with children(modules) as (_, (child,)):
        assert (await ask(child))["parent"] == os.getpid()


async def test_a_start_that_is_given_up_leaves_no_process(quick: Path) -> None:
    before = set(children_of(os.getpid()))
    async with children(quick, 2) as (_, (child, other)):
        await other.connect()
        starting = asyncio.ensure_future(child.connect())
        await asyncio.sleep(0.01)
        starting.cancel()
        await child.close()
        (parent,) = set(children_of(os.getpid())) - before
        async with asyncio.timeout(60):
            while children_of(parent) != [other.pid]:
                await asyncio.sleep(0.05)
    wait_until_gone([parent])
