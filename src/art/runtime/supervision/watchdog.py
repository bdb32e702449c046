"""Logs who waits for whom when nothing has moved for a while.

Progress is an answer of a child process, or new work of its main thread. The log reports a child that keeps a caller
waiting without progress, and a wait inside the server while no child works at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from art.runtime.supervision.process import ChildProcess
from art.runtime.supervision.waits import current_waits

logger = logging.getLogger(__name__)

CHECKS_PER_REPORT = 20
"""Number of checks within `after_s`, the time without progress after which a report is due."""


class Watchdog:
    """Logs a report after `after_s` without progress, and again when the wait has doubled. `run` needs its own task."""

    def __init__(
        self, processes: Callable[[], list[ChildProcess]], report: Callable[[], Awaitable[str]], after_s: float
    ) -> None:
        self._processes = processes
        self._report = report
        self._after_s = after_s
        self._last_busy = time.monotonic()

    async def run(self) -> None:
        due_s = self._after_s
        while True:
            await asyncio.sleep(self._after_s / CHECKS_PER_REPORT)
            stalled_s = self._stalled_s()
            if stalled_s < self._after_s:
                due_s = self._after_s
            elif stalled_s >= due_s:
                due_s = 2 * stalled_s
                try:
                    logger.warning("no progress for %.0f s\n%s", stalled_s, await self._report())
                except Exception:  # the next report may work
                    logger.exception("no progress for %.0f s, and no report", stalled_s)

    def _stalled_s(self) -> float:
        processes, now = self._processes(), time.monotonic()
        if any(process.pending or process.num_waiting for process in processes):
            self._last_busy = now
        waits = current_waits()
        without_children_s = min(now - self._last_busy, waits[0].age_s()) if waits else 0.0
        return max([without_children_s, *(process.stalled_s() for process in processes)])
