"""`art.retry`: calls a function again when it fails."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

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

    def wait_s(error: Exception, attempt: int) -> float:
        """Seconds to wait after a failed attempt. After the last attempt the error is raised."""
        if attempt == max_attempts:
            raise error
        if on_retry is not None:
            on_retry(error, attempt)
        return delay * backoff_factor ** (attempt - 1) * random.uniform(1 - jitter, 1 + jitter)

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                for attempt in range(1, max_attempts + 1):
                    try:
                        return await function(*args, **kwargs)
                    except exceptions as error:
                        pause_s = wait_s(error, attempt)
                    await asyncio.sleep(pause_s)
                raise AssertionError("unreachable")

            return call_async  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    pause_s = wait_s(error, attempt)
                time.sleep(pause_s)
            raise AssertionError("unreachable")

        return call  # type: ignore[return-value]

    return decorate
