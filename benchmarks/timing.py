"""Contenders take turns, so that whatever else the machine does hits all of them alike.

CPU time (of this process, all its threads, and of the processes that it has started) is what counts on a shared
machine; wall time is reported beside it, and is what counts on a GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from tqdm import tqdm

from benchmarks.report import Spread

Clock = Literal["cpu_s", "wall_s"]


@dataclass(frozen=True, slots=True)
class Timing:
    cpu_s: float
    wall_s: float

    def seconds(self, clock: Clock) -> float:
        return self.cpu_s if clock == "cpu_s" else self.wall_s

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)


def main_clock(device: str) -> Clock:
    """The clock that a comparison on `device` goes by."""
    return "wall_s" if device == "cuda" else "cpu_s"


def alternate(
    contenders: Mapping[str, Callable[[int], object]], *, repeats: int, device: str, label: str = ""
) -> dict[str, list[Timing]]:
    """Call each contender with the round's number, `repeats` rounds after a round 0 that is not counted.

    Every other round runs in reverse order: a contender that profits from the one before it does so half of the time.
    With a `label`, a bar on the terminal shows how far it is.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    with progress(label, total=(repeats + 1) * len(contenders)) as bar:
        for number in range(repeats + 1):
            names = list(contenders) if number % 2 else list(contenders)[::-1]
            for name in names:
                bar.set_postfix_str(name, refresh=False)
                timing = measure(lambda name=name, number=number: contenders[name](number), device)  # type: ignore[misc]
                if number > 0:
                    timings[name].append(timing)
                bar.update()
    return timings


def progress(label: str, *, total: int) -> tqdm:
    """A bar on standard error, named `label`; without a label it stays silent. A log gets a line now and then only."""
    every_s = 0.1 if sys.stderr.isatty() else 20.0
    return tqdm(desc=label, total=total, disable=not label, mininterval=every_s, maxinterval=every_s)


def ratio(slower: Sequence[Timing], faster: Sequence[Timing], clock: Clock) -> Spread:
    """How many times as long as `faster` the `slower` took, round by round."""
    pairs = zip(slower, faster, strict=True)
    return Spread.of([a.seconds(clock) / b.seconds(clock) for a, b in pairs])


def median(timings: Sequence[Timing], clock: Clock) -> float:
    return statistics.median(timing.seconds(clock) for timing in timings)


def measure(function: Callable[[], object], device: str) -> Timing:
    watch = Stopwatch(device)
    function()
    return watch.total()


class Stopwatch:
    """Measures this process and those it has started, all their threads, from when it is made or restarted."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self._start = self._last = self._now()

    def total(self) -> Timing:
        return self._now() - self._start

    def lap(self) -> Timing:
        """Since the last lap ended."""
        last, self._last = self._last, self._now()
        return self._last - last

    def _now(self) -> Timing:
        _finish(self._device)
        return Timing(cpu_s=time.process_time() + _children_cpu_s(), wall_s=time.perf_counter())


def _children_cpu_s() -> float:
    """CPU seconds of the processes below this one that live."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
