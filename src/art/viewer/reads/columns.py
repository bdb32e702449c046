"""Numbers of many steps in little memory: one array of steps and one of values per metric."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from art.viewer.conversation import number

MOST_NAMES = 2000
"""Metrics that are kept. Programs that make up names by the row have no use for curves."""
_LONGEST_NAME = 300


class Points(NamedTuple):
    """A metric by step, in the order of steps."""

    steps: NDArray[np.int64]  # [P]
    means: NDArray[np.float64]  # [P] over the rows of each step
    counts: NDArray[np.int64]  # [P] number of rows

    def between(self, first: int | None, last: int | None) -> Points:
        """Return the points from step `first` to step `last`, both included; `None` is no bound."""
        inside = np.ones(len(self.steps), dtype=bool)
        if first is not None:
            inside &= self.steps >= first
        if last is not None:
            inside &= self.steps <= last
        return Points(self.steps[inside], self.means[inside], self.counts[inside])


class Columns:
    """Collects rows of metrics, and gives each metric by step. Values that are no finite numbers are left out."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._steps: array[int] = array("q")

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row of a step."""
        self._steps.append(step)
        for name, item in row.items():
            value = number(item)
            if value is None or isinstance(item, bool):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_NAMES or len(name) > _LONGEST_NAME:
                    continue
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(value)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have a row, in order."""
        return np.unique(np.array(self._steps, dtype=np.int64))

    def points(self, name: str) -> Points:
        """Return a metric by step; empty for one without values."""
        steps, values = self._columns.get(name, (array("q"), array("d")))
        unique, place = np.unique(np.array(steps, dtype=np.int64), return_inverse=True)
        counts = np.bincount(place, minlength=len(unique)).astype(np.int64)
        sums = np.bincount(place, weights=np.array(values, dtype=np.float64), minlength=len(unique))
        return Points(unique, sums / np.maximum(counts, 1), counts)

    def at(self, step: int) -> dict[str, float]:
        """Return the mean of each metric at a step."""
        means = {}
        for name, (steps, values) in self._columns.items():
            chosen = np.array(values)[np.array(steps, dtype=np.int64) == step]
            if len(chosen):
                means[name] = float(chosen.mean())
        return means


def join(first: Points, second: Points, covered: NDArray[np.int64]) -> Points:
    """Join two series of a metric: the second one counts only at steps that are not in `covered`."""
    extra = ~np.isin(second.steps, covered)
    steps = np.concatenate([first.steps, second.steps[extra]])
    order = np.argsort(steps, kind="stable")
    return Points(
        steps[order],
        np.concatenate([first.means, second.means[extra]])[order],
        np.concatenate([first.counts, second.counts[extra]])[order],
    )
