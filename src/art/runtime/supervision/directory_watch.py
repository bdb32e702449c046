"""Notices that the data directory, or its lock or database, was removed or replaced while the server runs.

Each transaction checks this too, so nothing is written into a file that nobody can open any more. The watch is for what
does not write to the database for a while: a training step under way would put its checkpoint into a directory that is
no longer this server's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from art.errors import StorageError

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


async def watch_directory(check: Callable[[], None], stop_work: Callable[[StorageError], None]) -> None:
    """Run `check` every `CHECK_EVERY_S` until cancelled, and call `stop_work` with the error each time it fails.

    Args:
        check: raises a `StorageError` if the directory is gone. It may block: it runs in a thread.
    """
    was_gone = False
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        try:
            await asyncio.to_thread(check)
        except StorageError as error:
            if not was_gone:
                logger.error("%s", error)
            was_gone = True
            stop_work(error)
        else:
            if was_gone:
                logger.warning("the data directory is back, and jobs run again")
            was_gone = False
