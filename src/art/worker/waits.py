"""Waits that have a deadline, periods whose end is waited for, and the end of the server's own process."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

from art.config.server import JOB_TIMEOUT_S
from art.errors import ProcessError


@contextlib.asynccontextmanager
async def waiting(what: str, within_s: float) -> AsyncIterator[None]:
    """Wrap exactly one wait. The body must only wait for `what`. Raises `ProcessError` if it took longer than
    `within_s`."""
    try:
        async with asyncio.timeout(within_s) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ProcessError(f"timed out after {within_s:g} s waiting for {what}") from None


@contextlib.asynccontextmanager
async def acquired(lock: asyncio.Lock, what: str, within_s: float) -> AsyncIterator[None]:
    """Hold `lock` during the body. Getting it, described by `what`, may take at most `within_s`. Raises `ProcessError`
    if the wait took longer."""
    async with waiting(what, within_s):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


class BusyPeriod:
    """A period lasts while at least one `with period.held()` block runs. Others can wait for its end."""

    def __init__(self, end: str) -> None:
        """`end` describes its end, in messages about waiting for it."""
        self._end = end
        self._num_holders = 0
        self._ended = asyncio.Event()
        self._began = 0.0
        self._total_s = 0.0

    @property
    def lasts(self) -> bool:
        return self._num_holders > 0

    @property
    def total_s(self) -> float:
        """Seconds for which it has lasted so far."""
        return self._total_s + (time.monotonic() - self._began if self.lasts else 0.0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if not self.lasts:
            self._began = time.monotonic()
        self._num_holders += 1
        self._ended.clear()
        try:
            yield
        finally:
            total_s = self.total_s
            self._num_holders -= 1
            if self._num_holders == 0:
                self._total_s = total_s
                self._ended.set()

    async def until_ended(self, timeout_s: float = JOB_TIMEOUT_S) -> None:
        """Wait until no `held` block runs. Raises `ProcessError` if it lasted longer than `timeout_s`."""
        while self.lasts:
            async with waiting(self._end, timeout_s):
                await self._ended.wait()


def end_within(seconds: float) -> None:
    """Kill this process, and its children with it, unless it ends by itself within `seconds`."""

    def wait() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"art-server did not end within {seconds:.0f} s; the stacks of its threads:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    threading.Thread(target=wait, name="end", daemon=True).start()
