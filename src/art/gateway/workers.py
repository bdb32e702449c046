"""Threads for work on large requests, so that the event loop goes on answering everybody else.

Small work is done at once, because a thread would cost more than it. Large work waits for work of about its own size
only: a conversation of 50,000 characters does not wait for one of five million.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INLINE = 2**15
"""Characters or bytes up to which work is done at once. To render and tokenise them takes some 30 ms."""
_LARGE = 2**19
_THREADS, _LARGE_THREADS = 4, 2


class Workers:
    """Two pools of threads, which start when they are first needed."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(_THREADS, "large-request")
        self._large = ThreadPoolExecutor(_LARGE_THREADS, "huge-request")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that works on `size` characters or bytes, and return its result.

        If the caller is cancelled, a call that has not begun never begins.
        """
        if size <= INLINE:
            return function(*args, **kwargs)
        pool = self._middle if size <= _LARGE else self._large
        return await asyncio.wrap_future(pool.submit(function, *args, **kwargs))
