"""The pauses before a child is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from art.config.server import RestartConfig
from art.runtime.supervision import comeback
from art.runtime.supervision.comeback import Comeback


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lengths of pauses, which pass at once."""
    lengths: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        lengths.append(seconds)
        return asyncio.timeout(0)

    names = {name: getattr(asyncio, name) for name in ("Event", "Timeout")}
    monkeypatch.setattr(comeback, "asyncio", SimpleNamespace(timeout=timeout, **names))
    return lengths


async def fail(waiting: Comeback, times: int) -> None:
    for _ in range(times):
        waiting.note_failed_start()
        await waiting.pause()


async def test_pauses_double_up_to_the_longest(pauses: list[float]) -> None:
    waiting = Comeback(RestartConfig(first_pause_s=1.0, longest_pause_s=20.0))
    await fail(waiting, 7)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]


async def test_a_year_of_failures_is_counted(pauses: list[float]) -> None:
    waiting = Comeback(RestartConfig())
    await fail(waiting, 3000)
    assert pauses[-1] == 300.0


async def test_callers_get_the_error_after_some_failures_in_a_row(pauses: list[float]) -> None:
    waiting = Comeback(RestartConfig(failed_starts=2))
    await fail(waiting, 1)
    assert not waiting.is_hopeless
    waiting.note_up()
    await fail(waiting, 1)
    assert not waiting.is_hopeless
    await fail(waiting, 1)
    assert waiting.is_hopeless
    waiting.hurry()
    assert not waiting.is_hopeless
    await fail(waiting, 1)
    assert pauses[-1] == 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(comeback, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


async def test_series_of_crashes_have_growing_pauses_too(pauses: list[float], clock: Callable[[float], None]) -> None:
    waiting = Comeback(RestartConfig(crashes=3, crash_window_s=100.0))
    for expected in (1.0, 2.0, 4.0):
        for last in (False, False, True):
            waiting.note_up()
            clock(5.0)
            assert waiting.note_crash() is last
        await waiting.pause()
        assert pauses[-1] == expected
    waiting.note_up()
    clock(100.0)  # it ran well for as long as crashes are counted
    assert [waiting.note_crash() for _ in range(3)] == [False, False, True]
    await waiting.pause()
    assert pauses[-1] == 1.0


async def test_rare_crashes_are_not_counted_together(clock: Callable[[float], None]) -> None:
    waiting = Comeback(RestartConfig(crashes=2, crash_window_s=100.0))
    for _ in range(5):
        clock(100.0)
        assert not waiting.note_crash()


async def test_a_pause_ends_when_somebody_asks() -> None:
    waiting = Comeback(RestartConfig(first_pause_s=36_000.0, longest_pause_s=36_000.0))
    waiting.note_failed_start()
    pausing = asyncio.create_task(waiting.pause())
    await asyncio.sleep(0)
    assert "in 36000 s" in waiting.describe_next()
    waiting.hurry()
    await pausing  # not after ten hours
