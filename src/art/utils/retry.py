"""`art.retry`: calls a function again when it fails."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

from art.backoff import Backoff, Failure, call_with_retries

F = TypeVar("F", bound=Callable[..., Any])


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
    *,
    jitter: float = 0.25,
) -> Callable[[F], F]:
    """Decorate a function, async or not, to be called again when it raises one of `exceptions`.

    Args:
        max_attempts: calls in total; the last failure is raised.
        delay: seconds before the second call.
        backoff_factor: factor from one wait to the next.
        exceptions: errors after which the function is called again.
        on_retry: called with the error and the number of the failed attempt, from 1.
        jitter: share by which each wait is changed at random, so that rollouts that failed together do not retry
            together.
    """
    if max_attempts < 1:
        raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
    backoff = Backoff(first_s=delay, factor=backoff_factor, jitter=jitter)

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
