"""Splits the time in which an engine computes among the requests that it computes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedTime:
    """While n requests run, each uses 1/n of the time. The shares add up to the time in which any request ran.

    It costs the same for any number of requests: a clock runs at 1/n of the speed of real time, and a request's share
    is what that clock has gone on by between its begin and its end.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_running = 0
        self._num_pauses = 0
        self._shared_s = 0.0
        """What the clock shows."""
        self._at = 0.0
        """Real time at which it was last read."""

    @contextmanager
    def taken(self, on_end: Callable[[float], None]) -> Iterator[None]:
        """Count a request as running during the body, then call `on_end` with the seconds of its share."""
        began = self._read()
        self._num_running += 1
        try:
            yield
        finally:
            ended = self._read()
            self._num_running -= 1
            on_end(ended - began)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time during the body: the engine sleeps."""
        self._read()
        self._num_pauses += 1
        try:
            yield
        finally:
            self._read()
            self._num_pauses -= 1

    def _read(self) -> float:
        now = self._now()
        if self._num_running and not self._num_pauses:
            self._shared_s += (now - self._at) / self._num_running
        self._at = now
        return self._shared_s
