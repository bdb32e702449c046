"""`Pace`: when a group of rollouts may start, and which groups the next training step takes.

B groups make a step, and S is the largest staleness. Step s starts from checkpoint s and makes checkpoint s + 1. A
group that starts while v is the newest checkpoint is *due* in step v + S: trained later, it would be too stale. It may
start if

    outstanding + 1 <= B * (v + S - s + 1)

where `outstanding` are the groups that run or have finished and were not taken by a step, and s is the next step to be
begun. That is the formula of AReaL (arXiv 2505.24298), written for what is outstanding. Nothing is ever thrown away for
its age, and S = 0 is the plain loop: B groups start, are trained, and the next B start.

    B = 2, S = 1          running and finished groups             may start
    v = 0, s = 0          0 1 2 3                                 no: 4 = 2 * (0 + 1 - 0 + 1)
    step 0 takes 0 1      2 3            s = 1                    no: 2 = 2 * (0 + 1 - 1 + 1)
    step 0 published      2 3 4 5        v = 1, s = 1             no, after 4 and 5 have started

A step takes the oldest groups that have finished, and waits while the groups that would be left could not all be
trained in time (the earliest due date first is the order that succeeds whenever one does). This module has no clock and
no asyncio: the pipeline, the simulation and loops of one's own drive it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from art.errors import ConfigError


@dataclass
class Pace:
    """Admission of groups and choice of a step's groups, under a bound on staleness."""

    groups_per_step: int
    max_staleness: int
    step: int = 0
    """Next step to be begun: `version` while none is under way, and one more while one is."""
    last_step: int | None = None
    """Step at which the training ends: steps up to `last_step - 1` are begun. `None` never ends."""
    next_number: int = 0
    """Number of the next group."""
    version: int = field(init=False)
    """Step of the newest published checkpoint."""

    _running: dict[int, int] = field(default_factory=dict, init=False)
    """Version with which each running group started."""
    _finished: dict[int, int] = field(default_factory=dict, init=False)
    """Version with which each finished group started that no step has taken."""
    _due: Counter[int] = field(default_factory=Counter, init=False)
    """Number of outstanding groups by the step in which they are due."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0:
            raise ConfigError(
                f"a pace needs groups_per_step >= 1 and max_staleness >= 0; got {self.groups_per_step} and "
                f"{self.max_staleness}"
            )
        self.version = self.step

    @property
    def outstanding(self) -> int:
        """Number of groups that hold a place in a later step: running, or finished and not taken."""
        return len(self._running) + len(self._finished)

    @property
    def running(self) -> list[int]:
        """Numbers of the groups that run, oldest first."""
        return sorted(self._running)

    @property
    def finished(self) -> list[int]:
        """Numbers of the finished groups that no step has taken, oldest first."""
        return sorted(self._finished)

    @property
    def is_training(self) -> bool:
        """Whether a step is under way."""
        return self.step > self.version

    def may_start(self) -> bool:
        """Whether a group that starts now can be trained within the bound, and before the last step."""
        places = self.version + self.max_staleness - self.step + 1
        if self.last_step is not None:
            places = min(places, self.last_step - self.step)
        return self.outstanding < self.groups_per_step * places

    @property
    def is_held(self) -> bool:
        """Whether no group may start because it would be too stale when it is trained, though later steps need more."""
        needed = math.inf if self.last_step is None else self.groups_per_step * (self.last_step - self.step)
        return not self.may_start() and self.outstanding < needed

    def start(self) -> int:
        """Start a group with the newest checkpoint, and return its number.

        Raises:
            ConfigError: it could not be trained within the bound; ask `may_start` first.
        """
        if not self.may_start():
            raise ConfigError(f"no group may start before step {self.step}: {self.outstanding} are outstanding")
        number, self.next_number = self.next_number, self.next_number + 1
        self._add(number, self.version)
        return number

    def restore(self, number: int, version: int) -> bool:
        """Take up a group of an earlier run as running. Restore groups in the order of their numbers.

        Returns:
            Whether it can still be trained within the bound. If not, it is not taken up: run its scenario again.
        """
        due = version + self.max_staleness
        self._due[due] += 1
        fits = version <= self.version and self._is_feasible(self._due, self.step)
        self._due[due] -= 1
        if fits:
            self.next_number = max(self.next_number, number + 1)
            self._add(number, version)
        return fits

    def finish(self, number: int) -> None:
        """Note that a running group has finished."""
        self._finished[number] = self._running.pop(number)

    def lose(self, number: int) -> None:
        """Note that a running group ended without anything to train on. Its place is free again."""
        self._due[self._running.pop(number) + self.max_staleness] -= 1

    def next_step(self) -> list[int] | None:
        """Return the numbers of the groups with which the next step can begin now.

        They are `groups_per_step` groups, oldest first. `None` while the step has to wait: a step is under way, there
        are too few finished groups, or a running one has to be in it.
        """
        if self.is_training or self._is_over or len(self._finished) < self.groups_per_step:
            return None
        numbers = self._oldest()
        if not self._is_feasible(self._due - self._dues_of(numbers), self.step + 1):
            return None
        return numbers

    def last_groups(self) -> list[int] | None:
        """Return the numbers of the groups of a step that need not be full, when no further group will start.

        They are at most `groups_per_step` groups, oldest first. `None` while groups run, a step is under way, or
        nothing is left.
        """
        if self.is_training or self._running or not self.finished:
            return None
        return self._oldest()

    def begin(self, numbers: list[int]) -> None:
        """Begin the next step with the groups that `next_step` has returned."""
        if self.is_training:
            raise ConfigError(f"step {self.version} is under way; publish it, or skip it, before step {self.step}")
        for number in numbers:
            self._due[self._finished.pop(number) + self.max_staleness] -= 1
        self.step += 1

    def publish(self, step: int) -> None:
        """Note that the step under way has made checkpoint `step`. Groups that start from now on start with it.

        Raises:
            ConfigError: no step is under way that makes this checkpoint.
        """
        if not self.is_training or step != self.step:
            raise ConfigError(
                f"checkpoint {step} was published, expected {self.version + 1} after the groups of step {self.version} "
                "were taken: only the pipeline, or only your loop, may train this model at a time"
            )
        self.version = step

    def skip(self) -> None:
        """Note that the step under way has made no checkpoint. The next step starts from the same one.

        That is later than planned for no group: each is still trained in the step in which it is due, or before.
        """
        self.step = self.version

    @property
    def _is_over(self) -> bool:
        return self.last_step is not None and self.step >= self.last_step

    def _add(self, number: int, version: int) -> None:
        self._running[number] = version
        self._due[version + self.max_staleness] += 1

    def _oldest(self) -> list[int]:
        return heapq.nsmallest(self.groups_per_step, self._finished)

    def _dues_of(self, numbers: list[int]) -> Counter[int]:
        return Counter(self._finished[number] + self.max_staleness for number in numbers)

    def _is_feasible(self, due: Counter[int], step: int) -> bool:
        """Whether steps from `step` on, with `groups_per_step` groups each, can train every group by its due date."""
        # With the earliest due date first it suffices to compare, for each due date, the groups that are due by then
        # with the places of the steps up to it.
        count = 0
        for last in sorted(due):
            count += due[last]
            if count and count > self.groups_per_step * max(last - step + 1, 0):
                return False
        return True
