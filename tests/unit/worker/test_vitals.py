"""What is concluded from heartbeats."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from art.config import ServerConfig
from art.worker.child import rss_bytes
from art.worker.process import Vitals

LIMITS = ServerConfig(heartbeat_timeout_s=10.0)


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


def test_silence_is_noticed_also_before_the_first_heartbeat(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS)
    clock(59.0)
    assert vitals.stuck() is None
    clock(2.0)
    assert vitals.stuck() == "it was silent for 61 s (starting)"
    beat(vitals, "loading the model")
    clock(11.0)
    assert vitals.stuck() == "it was silent for 11 s (loading the model)"
    vitals.extend_deadlines(5.0)  # the supervisor itself stood still
    assert vitals.stuck() is None


def test_work_without_progress(clock: Callable[[float], None]) -> None:
    vitals = Vitals(LIMITS)
    beat(vitals, "loading the model", since_s=1801.0)
    assert vitals.stuck() is None, "that has a limit of its own"
    vitals.is_ready = True
    beat(vitals, "step", since_s=1799.0)
    assert vitals.stuck() is None
    beat(vitals, "step", since_s=1801.0)
    assert vitals.stuck() == "it made no progress for 1801 s (step)"
    beat(vitals, "idle", since_s=5000.0)
    assert vitals.stuck() is None


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
