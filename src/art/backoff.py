"""Calls that failed for a passing reason are made again: after which pause, and until when.

    backoff = Backoff(first_s=0.5, longest_s=30)
    answer = await call_with_retries(ask, backoff, give_up, retry_on=ConnectionError)

Pauses double up to a limit and are a little different for each caller, so that callers which failed together do not
come back together. A pause that the other side asks for, by `Retry-After`, is kept to.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before a call is made again: `first_s` after a first failure, then `factor` times as long each
    time, at most `longest_s`, and changed at random by up to a share of `jitter`. A pause that the other side asks for
    is kept to, up to `longest_asked_s`."""

    first_s: float
    longest_s: float = math.inf
    longest_asked_s: float = 300.0
    factor: float = 2.0
    jitter: float = 0.25

    def pause_s(self, num_failures: int, asked_s: float = 0.0) -> float:
        """Return the pause after `num_failures` failures in a row, in seconds. The other side asks for `asked_s`."""
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
    """Call until there is a result. `before_retry` is called at each failure, and raises an error if the call should
    not be made again. Only the errors `retry_on` lead to another call; others are raised at once."""
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


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[F], F]:
    """Decorate a function, async or not, to be called again when it raises one of `exceptions`.

    Each wait is a little different, so that rollouts that failed together do not retry together.

    Args:
        max_attempts: calls in total; the last failure is raised.
        delay: seconds before the second call.
        backoff_factor: factor from one wait to the next.
        exceptions: errors after which the function is called again.
        on_retry: called with the error and the number of the failed attempt, from 1.
    """
    if max_attempts < 1:
        raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
    backoff = Backoff(first_s=delay, factor=backoff_factor)

    def before_retry(error: Exception, attempt: int) -> None:
        if attempt == max_attempts:
            raise error
        if on_retry is not None:
            on_retry(error, attempt)

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                def after(failure: Failure) -> None:
                    before_retry(failure.error, failure.number)

                return await call_with_retries(lambda: function(*args, **kwargs), backoff, after, exceptions)

            return call_async  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    before_retry(error, attempt)
                time.sleep(backoff.pause_s(attempt))
            raise AssertionError("unreachable")

        return call  # type: ignore[return-value]

    return decorate
