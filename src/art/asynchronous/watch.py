"""Who waits for whom: seconds by state, and the rollouts that a step waits for."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


def now() -> float:
    """Return the time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


class Stopwatch:
    """Adds up the seconds in which something is the case."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def set(self, is_so: bool) -> None:
        """Say whether it is the case from now on."""
        if is_so == (self._since is not None):
            return
        if self._since is not None:
            self._total_s += now() - self._since
        self._since = now() if is_so else None

    def lap(self) -> float:
        """Return the seconds since the last call of `lap`, and begin again."""
        running = self._since is not None
        self.set(False)
        total_s, self._total_s = self._total_s, 0.0
        self.set(running)
        return total_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: it is the case during the body."""
        self.set(True)
        try:
            yield
        finally:
            self.set(False)


@dataclass(slots=True)
class RolloutClock:
    """When each running rollout began, and how long the last ones took."""

    began: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)
    """Time at which a rollout began and the id of its scenario, by number of the group and index in it."""
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    @contextmanager
    def measure(self, order: tuple[int, int], scenario_id: str) -> Iterator[None]:
        """Context manager: the rollout runs during the body."""
        self.began[order] = now(), scenario_id
        try:
            yield
        finally:
            began, _ = self.began.pop(order)
            self._seconds.append(now() - began)

    @property
    def median_s(self) -> float | None:
        """Median seconds of the last 256 rollouts; `None` if none has ended."""
        return statistics.median(self._seconds) if self._seconds else None

    def stragglers(self, groups: Iterable[int], most: int = 3) -> list[str]:
        """Describe the running rollouts of some groups that have run longest, at most `most` of them."""
        numbers = set(groups)
        late = sorted((began, *order, name) for order, (began, name) in self.began.items() if order[0] in numbers)
        median = "" if self.median_s is None else f", the median takes {self.median_s:.1f} s"
        return [
            f"rollout {index} of scenario {name} (group {group}) has run for {now() - began:.0f} s{median}"
            for began, group, index, name in late[:most]
        ]
