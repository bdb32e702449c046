"""Pauses between calls that are made again, and what the other side asks for."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

import pytest

from art.backoff import Backoff, Failure, call_with_retries, retry_after_s
from art.errors import OverloadedError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.25", 0.25), ("-3", 0.0), ("soon", None), ("nan", None), ("inf", None), (formatdate(0), 0.0)],
)
def test_a_retry_after_header_is_read(value: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": value}) == seconds
    assert retry_after_s({}) is None


def test_a_date_in_retry_after_counts_from_now() -> None:
    asked_s = retry_after_s({"retry-after": formatdate(time.time() + 1000)})
    assert asked_s is not None
    assert 900 < asked_s <= 1000


def test_pauses_double_up_to_a_limit_and_are_as_long_as_asked() -> None:
    backoff = Backoff(first_s=1, longest_s=5, longest_asked_s=60, jitter=0)
    assert [backoff.pause_s(number) for number in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]
    assert backoff.pause_s(1, asked_s=30) == 30
    assert backoff.pause_s(1, asked_s=1e9) == 60


async def test_a_call_is_made_again_until_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    async def fail() -> None:
        error = OverloadedError("busy")
        error.retry_after_s = 20.0
        raise error

    def before_retry(failure: Failure) -> None:
        if failure.number == 3:
            raise ValueError("enough") from failure.error

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(ValueError, match="enough"):
        await call_with_retries(fail, Backoff(first_s=1, jitter=0), before_retry, OverloadedError)
    assert slept == [20.0, 20.0]
    with pytest.raises(OverloadedError):
        await call_with_retries(fail, Backoff(first_s=1), before_retry, KeyError)
