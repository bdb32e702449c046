"""Running a command's coroutine on the fastest event loop that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


def run_coroutine(main: Coroutine[None, None, Result]) -> Result:
    """`asyncio.run`, by uvloop where there is one: a client of many requests saves about a tenth of its time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
