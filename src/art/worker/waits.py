"""How the server's process itself is watched: waits with a deadline, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import AsyncIterator

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


def end_within(seconds: float) -> None:
    """Kill this process, and its children with it, unless it ends by itself within `seconds`."""

    def wait() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"art-server did not end within {seconds:.0f} s; the stacks of its threads:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    threading.Thread(target=wait, name="end", daemon=True).start()
