"""Rates of the system view."""

from __future__ import annotations

import pytest

from art.runtime.live import WINDOW_S, Rates


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
