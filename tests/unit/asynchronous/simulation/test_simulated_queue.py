"""The clock and the queues of the simulation, against times computed by hand."""

from __future__ import annotations

import pytest

from art.asynchronous.simulation.events import Clock, WorkQueue


def ends_of(clock: Clock, queue: WorkQueue, *pieces: tuple[float, float]) -> list[float]:
    """When pieces of work end that are added at a time: pairs of that time and their seconds alone."""
    ends = [0.0] * len(pieces)

    def add(place: int, seconds: float) -> None:
        queue.add(seconds, lambda: ends.__setitem__(place, clock.now))

    for place, (at, seconds) in enumerate(pieces):
        clock.after(at, lambda place=place, seconds=seconds: add(place, seconds))  # type: ignore[misc]
    clock.run()
    return ends


def test_actions_are_called_in_the_order_of_their_times() -> None:
    clock, calls = Clock(), []
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.after(seconds, lambda name=name: calls.append((name, clock.now)))  # type: ignore[misc]
    clock.run()
    assert calls == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_work_without_limits_takes_its_own_time() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    assert ends_of(clock, queue, (0.0, 3.0), (1.0, 1.0), (9.0, 2.0)) == [3.0, 2.0, 11.0]
    assert queue.busy_s == pytest.approx(3.0 + 2.0)


def test_work_waits_for_a_seat_in_its_order() -> None:
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, seats=2), (0, 4.0), (0, 1.0), (0, 2.0), (0, 1.0)) == [4.0, 1.0, 3.0, 4.0]


def test_a_full_slowdown_shares_one_processor() -> None:
    """Two pieces of 1 and 3 s at half speed: the first ends at 2 s, the second has 2 s left, alone."""
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, slowdown=1.0), (0, 1.0), (0, 3.0)) == pytest.approx([2.0, 4.0])


def test_a_later_piece_slows_down_a_running_one() -> None:
    """At 1 s half of the first is left. Both take 1.5 times as long until the second ends at 2.5 s; 0 is left then."""
    clock = Clock()
    assert ends_of(clock, WorkQueue(clock, slowdown=0.5), (0, 2.0), (1, 1.0)) == pytest.approx([2.5, 2.5])


def test_a_pause_delays_and_is_not_busy() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    clock.after(1.0, queue.pause)
    clock.after(5.0, queue.resume)
    assert ends_of(clock, queue, (0, 2.0), (2.0, 1.0)) == pytest.approx([6.0, 6.0])
    assert queue.busy_s == pytest.approx(2.0)
