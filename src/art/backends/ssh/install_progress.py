"""Lines about an installation on another machine: what pip does, and that it goes on while pip says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

PROGRESS_EVERY_S, QUIET_S = 5.0, 30.0
_TOLD = ("making", "Collecting", "Downloading", "Processing", "Building", "Installing")
"""How the lines of an installation begin that are worth showing."""


@contextlib.asynccontextmanager
async def told(name: str, say: Callable[[str], None]) -> AsyncIterator[Callable[[str], None]]:
    """Give the body a function that takes each line of pip, and pass on one of them every few seconds.

    While there is none, as in the minutes in which pip unpacks torch, a line says that it goes on.
    """
    started = last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        last = time.monotonic()
        say(f"{name}: {last - started:.0f} s: {line}")

    def take(line: str) -> None:
        if time.monotonic() - last > PROGRESS_EVERY_S and line.startswith(_TOLD):
            tell(line.strip()[:100])

    async def go_on() -> None:
        while True:
            await asyncio.sleep(max(0.0, last + QUIET_S - time.monotonic()))
            if time.monotonic() >= last + QUIET_S:
                tell("still installing")

    going = asyncio.create_task(go_on())
    try:
        yield take
    finally:
        going.cancel()
