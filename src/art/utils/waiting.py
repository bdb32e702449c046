"""Making waits visible."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

SILENCE_S = 30.0


@contextlib.contextmanager
def announce_wait(what: str, *, every_s: float = SILENCE_S) -> Iterator[None]:
    """Log a line every `every_s` seconds that the body takes, saying what is waited for."""
    loop = asyncio.get_running_loop()
    start = time.monotonic()
    timer: asyncio.TimerHandle

    def announce() -> None:
        nonlocal timer
        logger.info("still waiting for %s (%.0f s)", what, time.monotonic() - start)
        timer = loop.call_later(every_s, announce)

    timer = loop.call_later(every_s, announce)
    try:
        yield
    finally:
        timer.cancel()
