"""When a child that cannot start, or that dies again and again, is started once more.

    starts fail            pauses of 1, 2, 4 s ... up to `longest_pause_s`; callers get the error after `failed_starts`
    20 crashes in 120 s    callers get the error, and the next start has a pause before it too

The cause may go away by itself: a folder that is mounted again, memory of a GPU that another program gives back, files
that are closed. So a child is tried for as long as something needs it, and callers do not wait for it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from art.config.server import RestartConfig


class Comeback:
    """Counts the failures of one child, and pauses before its next start."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self.num_failed_starts = 0
        """Starts in a row that failed."""
        self._num_setbacks = 0
        """Failed starts and series of crashes since the child last ran well. They decide the pause."""
        self._crashes: deque[float] = deque(maxlen=config.crashes)
        self._up_since = time.monotonic()
        self._due_at = 0.0
        self._hurry = asyncio.Event()

    def note_failed_start(self) -> None:
        self.num_failed_starts += 1
        self._num_setbacks += 1

    @property
    def is_hopeless(self) -> bool:
        """Whether `failed_starts` starts in a row have failed. Callers then get the error at once."""
        return self.num_failed_starts >= self._config.failed_starts

    def note_up(self) -> None:
        self.num_failed_starts = 0
        self._up_since = time.monotonic()

    def note_crash(self) -> bool:
        """Note that the child died while it was up. Returns whether that happens too often."""
        now, window_s = time.monotonic(), self._config.crash_window_s
        if now - self._up_since >= window_s:
            self._num_setbacks = 0
        self._crashes.append(now)
        if len(self._crashes) < self._config.crashes or now - self._crashes[0] >= window_s:
            return False
        self._crashes.clear()
        self._num_setbacks += 1
        return True

    def hurry(self) -> None:
        """Forget all failures and end the pause: somebody asks for the child, and the cause may be gone."""
        self.num_failed_starts = self._num_setbacks = 0
        self._crashes.clear()
        self._hurry.set()

    async def pause(self) -> None:
        """Wait until it is time for the next start, or until `hurry`."""
        longest_s = self._config.longest_pause_s
        doublings = min(max(0, self._num_setbacks - 1), 64)
        pause_s = min(longest_s, self._config.first_pause_s * 2**doublings)
        self._due_at = time.monotonic() + pause_s
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()

    def describe_next(self) -> str:
        """When the next start comes, as a sentence for an error."""
        left_s = self._due_at - time.monotonic()
        when = f"in {left_s:.0f} s" if left_s >= 1 else "now"
        return f"It is started again {when}, and after that with growing pauses"
