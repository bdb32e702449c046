"""Limits how many calls of an async function run at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

P = ParamSpec("P")
R = TypeVar("R")


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate an async function to run at most `n` times at once; further calls wait.

    Args:
        derive_key: called with the same arguments; each key has a limit of its own.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        # Semaphores belong to one event loop. Each is kept while a call uses it.
        by_loop: WeakKeyDictionary[Any, WeakValueDictionary[Hashable, asyncio.Semaphore]] = WeakKeyDictionary()

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = derive_key(*args, **kwargs) if derive_key is not None else None
            by_key = by_loop.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
            semaphore = by_key.setdefault(key, asyncio.Semaphore(n))
            async with semaphore:
                return await function(*args, **kwargs)

        return call

    return decorate
