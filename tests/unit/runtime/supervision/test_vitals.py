"""What is concluded from heartbeats: stuck, owing, stalled, leaking."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from art.config import ServerConfig
from art.protocol.rpc import PendingCall
from art.runtime.children.child import rss_bytes
from art.runtime.supervision.process import Vitals

LIMITS = ServerConfig(heartbeat_timeout_s=10.0)
GIB = 2**30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time forward."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def beat(vitals: Vitals, doing: str, since_s: float = 0.0) -> None:
    vitals.on_heartbeat({"doing": doing, "since_s": since_s})


def call(method: str = "generate") -> PendingCall:
    return PendingCall(method, "Task-1", time.monotonic(), time.monotonic(), lambda frame: None)


def test_silence_is_noticed_also_before_the_first_heartbeat(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS, os.getpid())
    clock(59.0)
    assert vitals.stuck([]) is None
    clock(2.0)
    assert vitals.stuck([]) == "it was silent for 61 s (starting)"
    beat(vitals, "loading the model")
    clock(11.0)
    assert vitals.stuck([]) == "it was silent for 11 s (loading the model)"
    vitals.extend_deadlines(5.0)  # the supervisor itself stood still
    assert vitals.stuck([]) is None


def test_work_without_progress(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS, os.getpid())
    beat(vitals, "loading the model", since_s=1801.0)
    assert vitals.stuck([call()]) is None, "that has a limit of its own"
    vitals.is_ready = True
    beat(vitals, "step", since_s=1799.0)
    assert vitals.stuck([call()]) is None
    beat(vitals, "step", since_s=1801.0)
    assert vitals.stuck([call()]) == "it made no progress for 1801 s (step)"
    beat(vitals, "idle", since_s=5000.0)
    assert vitals.stuck([]) is None


def test_an_idle_child_that_owes_an_answer(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS, os.getpid())
    lost = call("score")
    clock(11.0)
    beat(vitals, "step")
    assert vitals.stuck([lost]) is None, "it works"
    beat(vitals, "idle", since_s=9.0)
    assert vitals.stuck([lost]) is None, "it may just have answered"
    beat(vitals, "idle", since_s=11.0)
    assert vitals.stuck([lost]) == "it owes an answer to `score` for 11 s, and is idle"
    assert vitals.stuck([call()]) is None, "it is on its way"


def test_a_caller_waits_without_progress(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS, os.getpid())
    beat(vitals, "idle", since_s=500.0)
    assert vitals.stalled_s([]) == 0.0
    pending = call()
    clock(30.0)
    assert vitals.stalled_s([pending]) == 30.0
    beat(vitals, "step", since_s=4.0)
    assert vitals.stalled_s([pending]) == 4.0
    pending.last_frame = time.monotonic() - 1.0
    assert vitals.stalled_s([pending]) == 1.0


# -- memory --


def test_memory_is_that_of_a_process_and_what_it_has_started() -> None:
    before = rss_bytes(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as child:
        both, one = rss_bytes(os.getpid()), rss_bytes(child.pid)
        child.kill()
    assert before is not None
    assert both is not None
    assert one is not None
    assert abs(both - before - one) < 2**20
    assert rss_bytes(child.pid) is None


def watched(*rss: int) -> Vitals:
    vitals = Vitals(ServerConfig(memory_limit_bytes=3 * GIB), os.getpid())
    vitals.is_ready = True
    for used in rss:
        vitals.on_heartbeat({"doing": "idle", "rss_bytes": used})
    return vitals


def test_a_limit_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    assert watched(3 * GIB).memory_problem() is None
    assert watched(GIB, 3 * GIB + 1).memory_problem() == "it uses 3.00 GiB of memory, more than the limit of 3.00 GiB"
    assert not caplog.text
    assert watched(4 * GIB, 5 * GIB).memory_problem() is None, "a restart would not help"
    assert "a process that has just begun uses 4.00 GiB of memory" in caplog.text
