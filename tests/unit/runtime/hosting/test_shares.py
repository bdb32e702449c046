"""The shares of requests in the time of an engine."""

from __future__ import annotations

import pytest

from art.runtime.hosting.engine_handle import SharedTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_that_run_at_once_share_the_time() -> None:
    clock = Clock()
    time, shares = SharedTime(clock), dict[str, float]()
    long, short, late = (
        time.taken(lambda s, name=name: shares.update({name: s})) for name in ("long", "short", "late")
    )
    long.__enter__()
    clock.now += 4  # long alone
    short.__enter__()
    clock.now += 6  # both
    short.__exit__(None, None, None)
    clock.now += 1  # long alone
    long.__exit__(None, None, None)
    clock.now += 50  # nobody
    with late:
        clock.now += 2
    assert shares == pytest.approx({"long": 8.0, "short": 3.0, "late": 2.0})
    assert sum(shares.values()) == pytest.approx(13.0), "the time in which any request ran"


def test_a_sleeping_engine_uses_no_time() -> None:
    clock, shares = Clock(), list[float]()
    time = SharedTime(clock)
    with time.taken(shares.append):
        clock.now += 3
        with time.paused(), time.paused():
            clock.now += 10
        clock.now += 2
    assert shares == [5.0]


def test_a_request_that_fails_has_used_its_share() -> None:
    clock, shares = Clock(), list[float]()

    def ask() -> None:
        with SharedTime(clock).taken(shares.append):
            clock.now += 1
            raise ValueError("hung up")

    with pytest.raises(ValueError, match="hung up"):
        ask()
    assert shares == [1.0]
