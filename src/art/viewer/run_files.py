"""What the answers about one run are made from, read once and followed as it grows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art.errors import StorageError
from art.storage.layout import ModelPaths
from art.storage.state import read_state
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.indexing import Indexer
from art.viewer.reads.columns import Points, join
from art.viewer.reads.costs_of_run import CostsFile
from art.viewer.reads.history_file import HistoryFile
from art.viewer.reads.job_table import JobTable

MOST_KEPT = 8
"""Runs whose numbers stay in memory: a few MB each."""


@dataclass(slots=True)
class RunFiles:
    """The files and rows of one run. Hold `lock` while reading `history`, `costs` and `jobs`."""

    project: str
    name: str
    paths: ModelPaths
    database: ReadOnlyDatabase
    indexer: Indexer
    history: HistoryFile
    costs: CostsFile
    jobs: JobTable
    lock: threading.RLock = field(default_factory=threading.RLock)

    def refreshed(self) -> AbstractContextManager[object]:
        """Read what is new. Returns the lock, to hold for as long as they are read."""
        with self.lock:
            self.history.refresh()
            self.costs.refresh()
            self.jobs.refresh()
        return self.lock

    @property
    def num_damaged_rows(self) -> int:
        return self.history.num_damaged

    def recorded_settings(self) -> dict[str, Any]:
        """Return what was recorded of the run's settings, by section."""
        try:
            return read_state(self.paths.settings) or {}
        except StorageError:
            return {}

    def metric_names(self) -> list[str]:
        """Names of all metrics that the run has values of."""
        return list(dict.fromkeys([*self.history.columns.names, *self.jobs.columns.names]))

    def points(self, metric: str) -> Points:
        """Return a metric by step. Steps that no script logged have what the training job measured."""
        logged = self.history.columns
        return join(logged.points(metric), self.jobs.columns.points(metric), logged.steps())

    def nums_of_points(self) -> dict[str, int]:
        """Return the number of steps of each metric, as `points` has them."""
        logged, measured = self.history.columns, self.jobs.columns
        nums = {name: logged.num_steps(name) for name in logged.names}
        only_measured = np.setdiff1d(measured.steps(), logged.steps())
        if len(only_measured) > 0:
            for name in measured.names:
                extra = np.isin(measured.points(name).steps, only_measured)
                nums[name] = nums.get(name, 0) + int(extra.sum())
        return nums

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have metrics, in order."""
        return np.union1d(self.history.columns.steps(), self.jobs.columns.steps())

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the means of what was logged for a step; what its job measured, if nothing was."""
        return self.history.columns.at(step) or self.jobs.columns.at(step)

    def times(self) -> dict[int, float]:
        """Return when each step was logged or its job ended, the first time."""
        times: dict[int, float] = {}
        for steps, moments in (self.history.times, self.jobs.times):
            earlier = set(times)
            for step, moment in zip(steps, moments, strict=True):
                if step not in earlier:
                    times[step] = min(times.get(step, moment), moment)
        return times


class RunCache:
    """Keeps the runs that were asked for last."""

    def __init__(self, make: Callable[[str, str], RunFiles]) -> None:
        self._make = make
        self._runs: OrderedDict[tuple[str, str], RunFiles] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, project: str, name: str) -> RunFiles:
        """Return a run, as it was kept or new."""
        with self._lock:
            run = self._runs.pop((project, name), None) or self._make(project, name)
            self._runs[project, name] = run
            if len(self._runs) > MOST_KEPT:
                self._runs.popitem(last=False)
            return run
