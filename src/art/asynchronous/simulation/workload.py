"""What simulated rollouts do: turns, each with seconds in the engine and seconds of a tool."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

P99_QUANTILE = 2.3263479
"""Normal quantile of 99 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a rollout: a request to the engine, and then a tool.

    Example: an answer that takes the engine 0.3 s when it is alone, and a web request of 2 s
        Turn(engine_s=0.3, tool_s=2.0)
    """

    engine_s: float
    """Seconds of the request if it is the engine's only one."""
    tool_s: float = 0.0
    """Seconds that the tool takes and that nobody else waits for, such as a request to another service."""
    worker_s: float = 0.0
    """Seconds in which the tool occupies one of the machine's tool workers, after `tool_s`."""


RolloutTurns = Sequence[Turn]
Workload = Callable[[int, int], RolloutTurns]
"""Returns the turns of rollout `index` of group `number`: `workload(number, index)`. It must return the same turns for
the same arguments, so that runs with different pacing meet the same latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal distribution of seconds, given by its median and its 99th percentile.

    Example: LogNormal(median_s=0.2, p99_s=5.0) has a mean of 0.52 s
    """

    median_s: float
    p99_s: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99_s / self.median_s) / P99_QUANTILE

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2)

    def draw(self, rng: random.Random) -> float:
        return self.median_s * math.exp(self.sigma * rng.gauss())


def resampled(rollouts: Sequence[RolloutTurns], seed: int) -> Workload:
    """Make a workload whose rollouts are drawn from measured ones, with replacement."""

    def workload(number: int, index: int) -> RolloutTurns:
        return random.Random(f"{seed}/{number}/{index}").choice(rollouts)

    return workload
