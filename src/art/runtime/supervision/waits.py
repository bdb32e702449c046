"""Waits of the server's tasks, each with a description and a deadline.

    async with waiting("the trainer of ...", 60.0): ...

A wait for the answer of a child process is a `PendingCall` of its connection and does not appear here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from art.errors import ProcessError


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    who: str
    """Name of the asyncio task."""
    what: str
    since: float
    """Start of the wait, by `time.monotonic()`."""
    within_s: float

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what}, for {self.age_s():.0f} of {self.within_s:g} s"

    def age_s(self) -> float:
        return time.monotonic() - self.since


_waits: set[Wait] = set()
"""All current waits of this process, which has one event loop."""


@contextlib.asynccontextmanager
async def waiting(what: str, within_s: float) -> AsyncIterator[None]:
    """Wrap exactly one wait. The body must only wait for `what`.

    Raises:
        ProcessError: it took longer than `within_s`.
    """
    task = asyncio.current_task()
    wait = Wait(task.get_name() if task else "", what, time.monotonic(), within_s)
    _waits.add(wait)
    try:
        async with asyncio.timeout(within_s) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ProcessError(f"timed out after {within_s:g} s waiting for {what}") from None
    finally:
        _waits.discard(wait)


@contextlib.asynccontextmanager
async def acquired(lock: asyncio.Lock, what: str, within_s: float) -> AsyncIterator[None]:
    """Hold `lock` during the body. Getting it, described by `what`, may take at most `within_s`.

    Raises:
        ProcessError: the wait took longer.
    """
    async with waiting(what, within_s):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


def current_waits() -> list[Wait]:
    """All current waits, oldest first."""
    return sorted(_waits, key=lambda wait: wait.since)
