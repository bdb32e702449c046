"""Tells the user what a call is waiting for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

SILENCE_S = 30.0
LONGEST_SILENCE_S = 600.0


@contextlib.contextmanager
def announce_wait(
    what: str | Callable[[], str], *, every_s: float = SILENCE_S, longest_s: float = LONGEST_SILENCE_S
) -> Iterator[None]:
    """Context manager: log `what` the body waits for after `every_s` seconds, and again at doubling intervals.

    No interval is longer than `longest_s`.

    The log level is warning, because programs that have not set up logging show nothing below it.
    """
    loop = asyncio.get_running_loop()
    start = time.monotonic()
    timer: asyncio.TimerHandle

    def announce() -> None:
        nonlocal timer
        waited_s = time.monotonic() - start
        logger.warning("still waiting for %s (%.0f s)", what if isinstance(what, str) else what(), waited_s)
        timer = loop.call_later(min(waited_s, longest_s), announce)

    timer = loop.call_later(every_s, announce)
    try:
        yield
    finally:
        timer.cancel()


def progress_bar(description: str | None, total: int) -> Any:
    """A tqdm bar to use in a `with`; it shows nothing without a description."""
    from tqdm.auto import tqdm

    return tqdm(desc=description, total=total, disable=description is None)
