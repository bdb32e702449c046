"""A caller who is gone before what it has asked for is stored."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from art.storage.database import Database


async def cancel_while_stored(
    database: Database, change: Coroutine[Any, Any, Any], then: Callable[[], None] = lambda: None
) -> None:
    """Cancel `change` while its transaction runs, call `then` in the transaction, and await the end of `change`."""
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go_on.wait(60)
        then()

    run = database.run

    async def run_slowly(work: Callable[[sqlite3.Connection], Any]) -> Any:
        return await run(lambda connection: (wait(), work(connection))[1])

    database.run = run_slowly  # type: ignore[method-assign]
    task = asyncio.create_task(change)
    assert await asyncio.to_thread(began.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del database.run  # type: ignore[method-assign]
