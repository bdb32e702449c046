"""The protocol of sinks. A new tracker is a subclass of `Sink`, which a model gets by `report_metrics=[MySink]`, or by
its name if an installed package has an entry point for it in the group `art.trackers`; see docs/extending.md.

    class Prints(Sink):
        name = "prints"

        def start(self, run: Run) -> None:
            print("run", run.project, run.name)

        def metrics(self, row: Row) -> None:
            print(row.step, dict(row.metrics))

All methods of a sink run in one thread of its own, never in the event loop, so they may block. An exception of `start`
fails `model.register`. An exception of any later call never reaches training: the call is repeated, after pauses, until
it succeeds, in a later run if need be. `Refused` alone says that repeating is useless, and `art.errors.OverloadedError`
how long to wait.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from art.trajectory import TrajectoryGroup


class Refused(Exception):
    """The tracker will never accept this delivery, or a part of it. It is lost there, and the next one is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run that a sink reports: everything that one model logs, in all processes that train it."""

    project: str
    name: str
    """Name of the model."""
    folder: Path
    """Folder in the model's log where the sink may keep files of its own; it exists."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Base model, settings and the user's `config`, as plain JSON. Values that look like secrets are replaced.
    Settings that are recorded later come by `Sink.configure`."""

    @property
    def id(self) -> str:
        """An id of 16 hexadecimal digits, the same for each process that trains this model of this project."""
        return hashlib.sha256(f"{self.project}/{self.name}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values lie in bins of equal width, as a row counts them."""

    edges: tuple[float, ...]
    """Ends of the bins, one more than there are bins."""
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of `history.jsonl`. A step has several: one per `model.log` call."""

    number: int
    """Position among all rows of the run, from 0. It identifies the row: no other row of the run has it."""
    step: int
    """The training step, for the horizontal axis."""
    recorded_at: datetime
    metrics: Mapping[str, float]
    """Finite numbers by full name, such as `train/reward`. Values that were NaN or infinite are absent."""

    def split_histograms(self) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Return the metrics that are single numbers, and the histograms that the others are the bins of.

        Example: `data/reward_hist/0`, `/1` ... with `data/reward_min` and `data/reward_max` are `data/reward_hist`.
        """
        scalars, histograms = dict(self.metrics), {}
        for first in (name for name in self.metrics if name.endswith("_hist/0")):
            name = first.removesuffix("/0")
            low, high = (self.metrics.get(f"{name.removesuffix('_hist')}_{end}") for end in ("min", "max"))
            if low is None or high is None:
                continue
            bins = list(itertools.takewhile(scalars.__contains__, (f"{name}/{n}" for n in itertools.count())))
            counts = tuple(scalars.pop(one) for one in bins)
            if low == high:  # all values are equal: one bin around them
                histograms[name] = Histogram((low - 0.5, high + 0.5), (sum(counts),))
            else:
                width = (high - low) / len(counts)
                edges = (*(low + width * number for number in range(len(counts))), high)
                histograms[name] = Histogram(edges, counts)
        return scalars, histograms


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroups:
    """Groups of one split and step, as they were logged; large logs come in several pieces."""

    split: str
    step: int
    first: int
    """Position of `groups[0]` among all groups of the split and step, from 0. With it, `(split, step, first + i)`
    identifies the i-th group, and the index in the group a trajectory: derive ids from these, so that a repeated
    delivery gives the same ids."""
    groups: Sequence[TrajectoryGroup]


class Sink(ABC):
    """A connection from one run to one tracker. Make it cheaply: `start` does the work and imports the library."""

    name: ClassVar[str]
    """Name in `report_metrics`, in messages and of the cursor's file: letters, digits, `-` and `_`. An entry point has
    the same name."""
    takes_groups: ClassVar[bool] = False
    package: ClassVar[str | None] = None
    """Import name of the library that `start` imports. Where it is not installed, the tracker cannot be chosen."""
    extra: ClassVar[str | None] = None
    """Extra of ART that installs the library; `None` if pip knows it by its import name."""
    environment: ClassVar[tuple[str, ...]] = ()
    """Variables that, when all are set, choose the tracker for models whose `report_metrics` is `None`. `A|B` is set
    when either is."""
    switched_off_by: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Variables and values, any of which prevents that, such as `("WANDB_MODE", "disabled")`."""

    @abstractmethod
    def start(self, run: Run) -> int | None:
        """Check package, key and address, and open the run or continue it.

        Called once, before anything else. A tracker that cannot be reached at all must raise here.

        Returns:
            The number of rows that the tracker has of this run, if it can be asked. Delivery then continues after
            exactly these, so that a crash neither repeats nor omits a row. `None`: only the cursor counts, which is
            written after each accepted delivery; then a delivery may be repeated after a crash, with the same number.

        Raises:
            ConfigError: the package is missing, a key is wrong, ... The message says what to install or to set.
        """

    @abstractmethod
    def metrics(self, row: Row) -> None:
        """Send a row. Return once the tracker has accepted it.

        Raises:
            Refused: the tracker will never accept this row.
            Exception: anything else is retried.
        """

    def configure(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Take the run's config again: settings were recorded after `start`. Errors are those of `metrics`."""

    def groups(self, groups: LoggedGroups) -> None:  # noqa: B027
        """Send rollouts. Called only with `takes_groups`; errors are those of `metrics`."""

    def close(self, timeout_s: float) -> None:  # noqa: B027
        """Flush, and release what `start` opened. It may take `timeout_s` seconds."""
