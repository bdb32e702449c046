"""Detection of memory leaks from the resident memory of a process.

Caches that fill, allocators that keep memory and long calls all grow and then stop. A leak goes on. So the lowest value
of each window is compared with that of the previous window. A leak is a long row of windows in which each value is
higher than the one before, the total growth is large, and the second half grew by hardly less than the first.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque

from art.config import MemoryConfig

logger = logging.getLogger(__name__)

_STEADY = 0.7
"""Least growth of the second half as a share of the first half's. The growth of a filling cache slows down."""
_BUSY_WINDOWS = 10
"""A window ends when the process is idle, so that it covers whole calls, but at the latest after this many lengths."""


class MemoryWatch:
    """Watches the memory of one process, from the time when it has loaded its model."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._floors: deque[float] = deque(maxlen=config.leak_windows + 1)
        self._rss_bytes = 0
        self._window_start: float | None = None
        self._floor = float("inf")
        self._is_warm = False
        self._fits: bool | None = None
        """Whether the process was below the limit when it began; `None` before the first heartbeat."""

    def add(self, rss_bytes: int, *, idle: bool, now: float) -> None:
        """Take in the resident memory from a heartbeat; `now` is in seconds of a monotonic clock."""
        self._rss_bytes = rss_bytes
        limit = self._config.limit_bytes
        if self._fits is None and limit is not None:
            self._fits = rss_bytes <= limit
            if not self._fits:
                logger.warning(
                    "a process that has just begun uses %s of memory, more than `memory.limit_bytes` = %s: a restart "
                    "would not help, so the limit is ignored. Raise it, or use a smaller model or context",
                    _gib(rss_bytes), _gib(limit),
                )  # fmt: skip
        if self._window_start is None:
            self._window_start = now
        self._floor = min(self._floor, rss_bytes)
        length_s = now - self._window_start
        if length_s >= self._config.leak_window_s * (1 if idle else _BUSY_WINDOWS):
            if self._is_warm:  # caches fill in the first window
                self._floors.append(self._floor)
            self._is_warm = True
            self._window_start, self._floor = now, float("inf")

    def problem(self) -> str | None:
        """Explain why the process should be restarted, or return `None`."""
        limit = self._config.limit_bytes
        if self._fits and limit is not None and self._rss_bytes > limit:
            return f"it uses {_gib(self._rss_bytes)} of memory, more than the limit of {_gib(limit)}"
        least, floors = self._config.leak_growth_bytes, list(self._floors)
        if least is None or len(floors) <= self._config.leak_windows:
            return None
        middle = len(floors) // 2
        first, second = floors[middle] - floors[0], floors[-1] - floors[middle]
        rising = all(after > before for before, after in itertools.pairwise(floors))
        if rising and first + second >= least and second >= _STEADY * first:
            least_s = self._config.leak_windows * self._config.leak_window_s
            growth = f"from {_gib(floors[0])} to {_gib(floors[-1])}"
            return f"its memory has grown without a pause for {least_s:.0f} s or more, {growth}"
        return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
