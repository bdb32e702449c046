"""What is concluded from heartbeats: stuck, owing, stalled, leaking."""

from __future__ import annotations

import math
import os
import random
import subprocess
import time
from collections.abc import Callable

import pytest

from art.config import MemoryConfig, ServerConfig
from art.protocol.rpc import PendingCall
from art.runtime.children.child import rss_bytes
from art.runtime.supervision.memory_watch import MemoryWatch
from art.runtime.supervision.vitals import Vitals

LIMITS = ServerConfig(heartbeat_timeout_s=10.0, stall_timeout_s=100.0)
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
    beat(vitals, "loading the model", since_s=101.0)
    assert vitals.stuck([call()]) is None, "that has a limit of its own"
    vitals.is_ready = True
    beat(vitals, "step", since_s=99.0)
    assert vitals.stuck([call()]) is None
    beat(vitals, "step", since_s=101.0)
    assert vitals.stuck([call()]) == "it made no progress for 101 s (step)"
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

WINDOWS = MemoryConfig(leak_growth_bytes=GIB, leak_window_s=10.0, leak_windows=12)


def alarm(rss_gib: Callable[[float], float], *, seconds: int, idle_every: int = 1) -> str | None:
    """What is made of a process whose memory follows a curve."""
    watch = MemoryWatch(WINDOWS)
    for second in range(seconds):
        watch.add(int(rss_gib(second) * GIB), idle=second % idle_every == 0, now=float(second))
        if (problem := watch.problem()) is not None:
            return problem
    return None


def test_a_leak_is_found() -> None:
    problem = alarm(lambda t: 2 + t / 100, seconds=200)
    assert problem is not None
    assert problem.startswith("its memory has grown without a pause for 120 s or more, from 2.1")


def test_a_leak_is_found_below_the_ups_and_downs_of_calls() -> None:
    rng = random.Random(0)
    assert alarm(lambda t: 2 + t / 100 + (3 * rng.random() if t % 30 else 0), seconds=900, idle_every=30) is not None


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(lambda t: 2 + 8 * (1 - math.exp(-t / 60)), id="a cache that fills and slows down"),
        pytest.param(lambda t: 2 + min(t, 60) / 10, id="one that fills evenly until it is full"),
        pytest.param(lambda t: 2 + 3 * (t > 200), id="a new adapter"),
        pytest.param(lambda t: 2 + math.floor(t / 50), id="pools that grow by large pieces"),
        pytest.param(lambda t: 5 + 3 * math.sin(t / 15), id="ups and downs"),
        pytest.param(lambda t: 2 + 0.5 * t / 1000, id="slow growth that is not worth a restart"),
    ],
)
def test_what_is_no_leak(curve: Callable[[float], float]) -> None:
    assert alarm(curve, seconds=600) is None


def test_noise_is_no_leak() -> None:
    rng = random.Random(1)
    assert alarm(lambda t: 4 + 2 * rng.random(), seconds=3000) is None


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


def test_a_limit_and_no_limit(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch(MemoryConfig(limit_bytes=3 * GIB))
    watch.add(3 * GIB, idle=True, now=0.0)
    assert watch.problem() is None
    watch.add(3 * GIB + 1, idle=False, now=1.0)
    assert watch.problem() == "it uses 3.00 GiB of memory, more than the limit of 3.00 GiB"
    too_low = MemoryWatch(MemoryConfig(limit_bytes=3 * GIB))
    too_low.add(4 * GIB, idle=True, now=0.0)
    assert too_low.problem() is None
    assert "a process that has just begun uses 4.00 GiB of memory" in caplog.text
    off = MemoryWatch(MemoryConfig(leak_growth_bytes=None, leak_window_s=1.0, leak_windows=4))
    for second in range(100):
        off.add(second * GIB, idle=True, now=float(second))
    assert off.problem() is None
