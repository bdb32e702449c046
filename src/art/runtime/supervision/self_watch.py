"""How `art-server` watches itself: a report on request, stacks when it is blocked, and an end that is enforced.

SIGUSR1   the event loop writes a report to `logs/report.txt`, which `art status` shows
SIGUSR2   a handler in C writes the stack of the main thread, which runs the event loop, to `logs/server-stacks.log`;
          it works while the loop is blocked
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TextIO

from art.storage.atomic import write_file
from art.storage.layout import DataDir
from art.storage.log_lines import clean, known_secrets

logger = logging.getLogger("art.server")

REPORT_SIGNAL, STACKS_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
BLOCKED_AFTER_S = 60.0
_ARM_S = 5.0


class ServerWatch:
    """Lets a server write its report and stacks on signals, and when it is blocked. `run` needs its own task."""

    def __init__(self, data_dir: DataDir, report: Callable[[], Awaitable[str]]) -> None:
        self._data_dir = data_dir
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._stacks: TextIO | None = None

    def install(self) -> None:
        """Handle the signals. Must come before others can find this process, because unhandled signals would end it."""
        self._data_dir.logs.mkdir(parents=True, exist_ok=True)
        self._stacks = self._data_dir.server_stacks.open("a", encoding="utf-8")
        faulthandler.enable()
        # The kernel gives the signal to the main thread. The stacks of other threads cannot be read safely while they
        # run: that has ended servers with a segmentation fault.
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=False)
        asyncio.get_running_loop().add_signal_handler(REPORT_SIGNAL, self._on_report_signal)

    async def run(self) -> None:
        """Keep postponing the traceback that is written when the event loop is blocked."""
        while True:
            faulthandler.dump_traceback_later(BLOCKED_AFTER_S, repeat=True)
            await asyncio.sleep(_ARM_S)

    def _on_report_signal(self) -> None:
        task = asyncio.create_task(self._write(), name="report")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        try:
            text = await self._report()
            await asyncio.to_thread(write_file, self._data_dir.report, clean(text, known_secrets()).encode())
        except Exception:
            logger.exception("the report could not be written")


def end_within(seconds: float) -> None:
    """Kill this process, and its children with it, unless it ends by itself within `seconds`."""

    def wait() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"art-server did not end within {seconds:.0f} s; the stacks of its threads:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    threading.Thread(target=wait, name="end", daemon=True).start()
