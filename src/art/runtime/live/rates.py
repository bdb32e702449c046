"""How fast counters grow, from their values at the moments at which somebody asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0
"""Rates are means over at most this time."""


class Rates:
    """Remembers counters by name. It works only when it is asked."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, counters: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Take the present counters, and return how much each grew per second; none in the first second.

        A counter that is new, or smaller than it was, has no rate: its process has started again.
        """
        now = time.monotonic() if now is None else now
        while self._samples and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            self._samples.append((now, counters))
            return {}
        at, earlier = self._samples[0]
        if now - self._samples[-1][0] >= 1.0:  # many viewers ask; one sample per second is enough
            self._samples.append((now, counters))
        if now - at < 1.0:  # a page that asks twice at once would see that nothing has grown
            return {}
        grown = {name: value - earlier[name] for name, value in counters.items() if name in earlier}
        return {name: growth / (now - at) for name, growth in grown.items() if growth >= 0}
