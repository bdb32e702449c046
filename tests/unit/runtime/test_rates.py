"""Rates of the system view."""

from __future__ import annotations

import pytest

from art.protocol.live import SystemHistory
from art.runtime.live import HISTORY_POINTS, WINDOW_S, Rates, SystemFollower


def test_rates_are_means_over_at_most_a_minute() -> None:
    rates = Rates()
    assert rates.add({"a": 0.0}, now=100.0) == {}
    assert rates.add({"a": 50.0, "new": 9.0}, now=110.0) == {"a": 5.0}
    assert rates.add({"a": 50.0, "new": 19.0}, now=150.0) == {"a": 1.0}
    later = rates.add({"a": 110.0, "new": 20.0}, now=105.0 + WINDOW_S)  # the first sample is too old by now
    assert later == {"a": pytest.approx(60 / 55), "new": pytest.approx(11 / 55)}
    assert rates.add({"a": 0.0}, now=166.0) == {}  # the process began again
    assert rates.add({"a": 1.0}, now=1000.0) == {}  # nobody has asked for long


def test_a_page_that_asks_twice_at_once_sees_no_rate() -> None:
    """Nothing has grown between two questions at once, and a busy process would seem to be idle."""
    rates = Rates()
    rates.add({"a": 5.0}, now=100.0)
    assert rates.add({"a": 5.0}, now=100.2) == {}
    assert rates.add({"a": 9.0}, now=102.0) == {"a": 2.0}


def test_many_viewers_do_not_make_many_samples() -> None:
    rates = Rates()
    for i in range(100):
        rates.add({"a": float(i)}, now=100 + i / 100)
    assert len(rates._samples) == 1


def test_the_last_hour_has_rates_between_points_and_no_point_before_the_first() -> None:
    follower = SystemFollower()
    follower.note(100, 0, 1, 7, now=1000.0)
    assert follower.history() == SystemHistory()
    follower.note(300, 50, 2, 8, now=1020.0)
    follower.note(0, 50, 0, 9, now=1040.0)  # a counter never falls; if it does, nothing is known to have been sampled
    assert follower.history() == SystemHistory(
        at=[1020.0, 1040.0], sampled_per_s=[10.0, 0.0], trained_per_s=[2.5, 0.0], num_requests=[2, 0], rss_bytes=[8, 9]
    )
    for number in range(HISTORY_POINTS + 3):
        follower.note(0, 50, 0, 9, now=2000.0 + number)
    assert len(follower.history().at) == HISTORY_POINTS
