"""Calls that failed for a passing reason are made again: after which pause, and until when.

    backoff = Backoff(first_s=0.5, longest_s=30)
    answer = await call_with_retries(ask, backoff, give_up, retry_on=ConnectionError)

Pauses double up to a limit and are a little different for each caller, so that callers which failed together do not
come back together. A pause that the other side asks for, by `Retry-After`, is kept to.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before a call is made again."""

    first_s: float
    """Pause after a first failure."""
    longest_s: float = math.inf
    """Limit of our own pauses."""
    longest_asked_s: float = 300.0
    """Limit of pauses that the other side asks for."""
    factor: float = 2.0
    """Factor from one pause to the next."""
    jitter: float = 0.25
    """Share by which a pause is changed at random."""

    def pause_s(self, num_failures: int, asked_s: float = 0.0) -> float:
        """Return the pause after the last of `num_failures` failures in a row, in seconds.

        Args:
            asked_s: pause that the other side asks for.
        """
        own_s = min(self.first_s * self.factor ** min(num_failures - 1, 60), self.longest_s)
        own_s *= random.uniform(1 - self.jitter, 1 + self.jitter)
        return max(own_s, min(asked_s, self.longest_asked_s) * random.uniform(1, 1 + self.jitter))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that failed, and what came before it."""

    error: Exception
    number: int
    """Number of failures so far, this one included."""
    lasting_s: float
    """Seconds since the first call that failed was begun."""
    pause_s: float
    """Pause before the next call."""


async def call_with_retries(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    before_retry: Callable[[Failure], None],
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> T:
    """Call until there is a result.

    Args:
        before_retry: called at each failure. It raises an error if the call should not be made again.
        retry_on: errors after which the call may be made again. Others are raised at once.
    """
    began, number = time.monotonic(), 0
    while True:
        try:
            return await call()
        except retry_on as error:
            number += 1
            pause_s = backoff.pause_s(number, asked_pause_s(error))
            before_retry(Failure(error=error, number=number, lasting_s=time.monotonic() - began, pause_s=pause_s))
        await asyncio.sleep(pause_s)


def asked_pause_s(error: BaseException) -> float:
    """Return the pause that an error asks for: by `retry_after_s`, as our own do, or in the headers of its response."""
    asked_s = getattr(error, "retry_after_s", None)
    if asked_s is not None:
        return float(asked_s)
    headers = getattr(getattr(error, "response", None), "headers", None)
    return 0.0 if headers is None else retry_after_s(headers) or 0.0


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, by number or date; `None` without a readable one."""
    value = headers.get("retry-after", "")
    try:
        pause_s = float(value)
    except ValueError:
        try:
            pause_s = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(pause_s, 0.0) if math.isfinite(pause_s) else None
