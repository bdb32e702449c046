from __future__ import annotations

import asyncio
import os
import re
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import art.worker.launch
import art.worker.process
from art.config import ServerConfig
from art.config.server import FAILED_STARTS
from art.errors import ConfigError, ProcessError
from art.protocol.rpc import RpcClient
from art.runtime.placement import split_threads
from art.storage.logs import log_tail
from art.worker.process import ChildProcess, ChildSpec
from art.worker.waits import acquired
from tests.support.calls import raw

CHILD = """
import sys, time
import art.worker.child
from art.worker.child import child_from_argv

art.worker.child.HEARTBEAT_S = 0.1
child = child_from_argv("echo")
print("echo child started", file=sys.stderr, flush=True)
while True:
    child.tick("idle")
    frame = child.read()
    if "cancel" in frame:
        continue
    method, params = frame["method"], frame["params"]
    if method == "start" and params.get("refuse"):
        from art.errors import ConfigError
        child.socket.fail(frame["id"], ConfigError("no such model"))
    elif method == "die":
        print("about to fail: out of luck", file=sys.stderr, flush=True)
        import os; os._exit(3)
    elif method == "hang":
        child.tick("hanging")
        time.sleep(60)
    elif method == "count":
        for i in range(params["n"]):
            child.socket.reply(frame["id"], i, last=i == params["n"] - 1)
    else:
        child.socket.reply(frame["id"], params)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(art.worker.process, "CHECK_S", 0.1)
    return "echo_child"


def spec(
    module: str,
    tmp_path: Path,
    *,
    is_new: bool = False,
    first_pause_s: float = 0.01,
    **changes: Any,
) -> ChildSpec:
    times: dict[str, Any] = {"child_start_timeout_s": 20.0, "heartbeat_timeout_s": 20.0}
    return ChildSpec(
        name="echo",
        module=module,
        log_path=tmp_path / "echo.log",
        num_threads=1,
        config=ServerConfig.model_validate(times | changes),
        is_new=is_new,
        first_pause_s=first_pause_s,
    )


async def start(client: RpcClient) -> None:
    await client.call(raw("start"))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


async def until_it_beats(process: ChildProcess, doing: str = "") -> None:
    """A heartbeat has come that says what the child does."""
    await until(lambda: doing in process.status.get("doing", ()))


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[ChildProcess], None]:
    """Stops a child, which then writes no stack when it is killed, so that nobody need wait for that."""

    def send(process: ChildProcess) -> None:
        assert process.pid is not None
        monkeypatch.setattr(art.worker.launch, "ABORT_TIMEOUT_S", 0.1)
        os.kill(process.pid, signal.SIGSTOP)

    return send


@pytest.fixture
async def child(module: str, tmp_path: Path) -> AsyncIterator[ChildProcess]:
    process = ChildProcess(spec(module, tmp_path), start)
    yield process
    await process.close()


async def test_calls_and_streams(child: ChildProcess) -> None:
    client = await child.connect()
    assert await client.call(raw("echo", a=1)) == {"a": 1}
    assert [i async for i in client.stream(raw("count", n=3))] == [0, 1, 2]


async def test_death_fails_pending_calls_with_the_log_and_a_new_child_comes_up(child: ChildProcess) -> None:
    client = await child.connect()
    with pytest.raises(ProcessError):
        await client.call(raw("die"))
    await until(lambda: child.num_restarts > 0)
    with pytest.raises(ProcessError, match="exit status 3"):
        await client.call(raw("echo"))
    assert "out of luck" in log_tail(child.spec.log_path)
    assert await (await child.connect()).call(raw("echo", b=2)) == {"b": 2}


async def test_sigkill_is_survived_and_named(child: ChildProcess) -> None:
    client = await child.connect()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child.num_restarts > 0)
    with pytest.raises(ProcessError, match="signal 9"):
        await client.call(raw("echo"))
    assert await (await child.connect()).call(raw("echo")) == {}


async def test_a_child_that_dies_while_there_is_no_room_for_it_comes_back_when_there_is(
    module: str, tmp_path: Path
) -> None:
    may_start = asyncio.Event()
    may_start.set()
    process = ChildProcess(spec(module, tmp_path), start, may_start)
    client = await process.connect()
    may_start.clear()
    with pytest.raises(ProcessError):
        await client.call(raw("die"))
    waiting = asyncio.ensure_future(process.connect())
    await until(lambda: process.pid is None)
    await asyncio.sleep(0.3)
    assert process.pid is None
    assert not waiting.done()
    may_start.set()
    assert await (await waiting).call(raw("echo", a=1)) == {"a": 1}
    await process.close()


async def test_what_initialise_refuses_answers_who_named_a_new_model(module: str, tmp_path: Path) -> None:
    async def refused(client: RpcClient) -> None:
        await client.call(raw("start", refuse=True))

    process = ChildProcess(spec(module, tmp_path, is_new=True), refused)
    with pytest.raises(ConfigError, match="no such model"):
        await process.connect()
    await process.close()


async def test_a_child_that_cannot_start_fails_its_callers_with_its_log(tmp_path: Path) -> None:
    process = ChildProcess(spec("no_such_module_anywhere", tmp_path), start)
    with pytest.raises(ProcessError, match=r"died while starting \(exit status 1\)(.|\n)*No module named"):
        await process.connect()
    await process.close()


async def test_a_stopped_child_is_killed_its_callers_learn_why_and_a_new_one_answers(
    module: str, tmp_path: Path, stop: Callable[[ChildProcess], None]
) -> None:
    process = ChildProcess(spec(module, tmp_path, heartbeat_timeout_s=2.5), start)
    client = await process.connect()
    await until_it_beats(process)
    stop(process)
    cause = r"the echo died \(signal 9, SIGKILL; it was silent for (\d+) s.* and was killed\)"
    async with asyncio.timeout(60):
        with pytest.raises(ProcessError, match=cause) as caught:
            await client.call(raw("echo"))
        assert await (await process.connect()).call(raw("echo")) == {}
    ends = [re.search(cause, text) for text in (caught.value.message, str(process.status["last_end"]))]
    assert all(end is not None and int(end[1]) >= 3 for end in ends), (
        "it was silent for 2.5 s, or longer on a busy machine"
    )
    await process.close()


async def test_a_child_stopped_while_it_starts_is_started_again(
    module: str, tmp_path: Path, stop: Callable[[ChildProcess], None]
) -> None:
    stops = [True]

    async def stopped_once(client: RpcClient) -> None:
        if stops and stops.pop():
            await until_it_beats(process)
            stop(process)
        await client.call(raw("start"))

    process = ChildProcess(spec(module, tmp_path, heartbeat_timeout_s=2.5), stopped_once)
    async with asyncio.timeout(60):
        assert await (await process.connect()).call(raw("echo")) == {}
    await process.close()


async def test_a_child_whose_main_thread_hangs_is_killed_though_its_heart_beats(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(art.worker.process, "STALL_TIMEOUT_S", 1.0)
    process = ChildProcess(spec(module, tmp_path), start)
    client = await process.connect()
    async with asyncio.timeout(60):
        with pytest.raises(ProcessError, match=r"no progress for \d+ s \(hanging\) and was killed(.|\n)*in <module>"):
            await client.call(raw("hang"))  # the end of the log shows where it hung
    assert await (await process.connect()).call(raw("echo")) == {}  # and the old heartbeat does not kill the new child
    await asyncio.sleep(0.5)  # for some checks
    assert process.num_restarts == 1
    await process.close()


async def test_the_status_says_what_the_child_does(child: ChildProcess) -> None:
    client = await child.connect()
    hanging = asyncio.create_task(client.call(raw("hang")), name="the caller")
    await until_it_beats(child, doing="hanging")
    status = child.status
    assert (status["state"], status["pid"], status["doing"]) == ("up", child.pid, "hanging")
    assert 0 < status["rss_bytes"] < 2**30
    hanging.cancel()


async def test_a_wait_has_a_name_and_a_deadline() -> None:
    lock = asyncio.Lock()
    async with lock:
        with pytest.raises(ProcessError, match=r"timed out after 0\.05 s waiting for its turn"):
            async with acquired(lock, "its turn", 0.05):
                pass


async def test_a_failed_child_can_be_started_again_without_a_pause(module: str, tmp_path: Path) -> None:
    refusals = [True]

    async def refused_once(client: RpcClient) -> None:
        await client.call(raw("start", refuse=bool(refusals and refusals.pop())))

    process = ChildProcess(spec(module, tmp_path, is_new=True, first_pause_s=300.0), refused_once)
    for _ in range(2):  # asking for it does not end the pause
        with pytest.raises(ConfigError, match="no such model"):
            await process.connect()
    assert process.has_failed
    process.start()
    async with asyncio.timeout(60):
        assert await (await process.connect()).call(raw("echo", a=1)) == {"a": 1}
    await process.close()


async def until_up(process: ChildProcess) -> RpcClient:
    await until(lambda: process.live_client is not None)
    assert process.live_client is not None
    return process.live_client


async def test_a_child_that_cannot_start_for_a_while_comes_back_by_itself(module: str, tmp_path: Path) -> None:
    """A folder that is away when the child is started again, and comes back after its callers got the error."""
    away = False

    async def read_folder(client: RpcClient) -> None:
        await client.call(raw("start", refuse=away))

    process = ChildProcess(spec(module, tmp_path, is_new=True), read_folder)
    client = await process.connect()
    away = True
    with pytest.raises(ProcessError):
        await client.call(raw("die"))
    with pytest.raises(ProcessError, match=r"the echo could not start: no such model\nIt is started again") as caught:
        await process.connect()
    assert not isinstance(caught.value, ConfigError), "the settings were right, so this is no error of the request"
    assert process.status["state"] == "failed"
    away = False
    assert await (await until_up(process)).call(raw("echo", a=1)) == {"a": 1}
    assert process.status["state"] == "up"
    assert await process.connect() is process.live_client
    await process.close()


async def test_a_model_that_worked_with_an_earlier_server_is_not_refused(module: str, tmp_path: Path) -> None:
    async def refused(client: RpcClient) -> None:
        await client.call(raw("start", refuse=True))

    process = ChildProcess(spec(module, tmp_path), refused)
    with pytest.raises(ProcessError, match="could not start: no such model"):
        await process.connect()
    await process.close()


async def test_a_child_that_dies_again_and_again_comes_back_too(module: str, tmp_path: Path) -> None:
    process = ChildProcess(spec(module, tmp_path), start)
    for _ in range(FAILED_STARTS + 1):
        client = await process.connect()
        with pytest.raises(ProcessError):
            await client.call(raw("die"))
    assert await (await until_up(process)).call(raw("echo", a=1)) == {"a": 1}
    await process.close()


async def test_a_child_that_says_why_it_cannot_start_is_quoted(module: str, tmp_path: Path) -> None:
    async def sad(client: RpcClient) -> None:
        await client.call(raw("start"))
        raise ProcessError("the server that it needs has died")

    process = ChildProcess(spec(module, tmp_path), sad)
    with pytest.raises(ProcessError, match="the echo could not start: the server that it needs has died"):
        await process.connect()
    await process.close()


async def test_closing_releases_all_who_wait(module: str, tmp_path: Path) -> None:
    async def never(client: RpcClient) -> None:
        await asyncio.Event().wait()

    process = ChildProcess(spec(module, tmp_path), never)
    waiting = asyncio.ensure_future(process.connect())
    await asyncio.sleep(0.2)
    async with asyncio.timeout(60):
        await process.close()
        with pytest.raises(ProcessError, match="closed"):
            await waiting


async def test_close_leaves_no_process(child: ChildProcess) -> None:
    await child.connect()
    pid = child.pid
    await child.close()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_are_disjoint_by_default() -> None:
    engine, trainer = split_threads(None, None)
    cores = len(os.sched_getaffinity(0))
    assert engine >= 1
    assert trainer >= 1
    assert engine + trainer <= max(2, cores)
    assert split_threads(3, None)[0] == 3
