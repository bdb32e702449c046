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


class _Column:
    """Values of one metric, in the order of the rows."""

    __slots__ = ("_is_ascending", "steps", "values")

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")
        self._is_ascending = True
        """Whether each value is of a later step than the one before."""

    def add(self, step: int, value: float) -> None:
        self._is_ascending = self._is_ascending and (not self.steps or step > self.steps[-1])
        self.steps.append(step)
        self.values.append(value)

    def num_steps(self) -> int:
        return len(self.steps) if self._is_ascending else len(set(self.steps))

    def points(self) -> Points:
        steps, values = np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64)
        if self._is_ascending:
            return Points(steps, values, np.ones(len(steps), dtype=np.int64))
        unique, place = np.unique(steps, return_inverse=True)
        counts = np.bincount(place, minlength=len(unique)).astype(np.int64)
        sums = np.bincount(place, weights=values, minlength=len(unique))
        return Points(unique, sums / counts, counts)


class Columns:
    """Collects rows of metrics, and gives each metric by step. Values that are no finite numbers are left out."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
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
                column = self._columns[name] = _Column()
            column.add(step, value)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have a row, in order."""
        return np.unique(np.array(self._steps, dtype=np.int64))

    def points(self, name: str) -> Points:
        """Return a metric by step; empty for one without values."""
        return self._columns.get(name, _EMPTY).points()

    def num_steps(self, name: str) -> int:
        """Return the number of steps that have a value of a metric."""
        return self._columns.get(name, _EMPTY).num_steps()

    def at(self, step: int) -> dict[str, float]:
        """Return the mean of each metric at a step."""
        means = {}
        for name, column in self._columns.items():
            chosen = np.array(column.values)[np.array(column.steps, dtype=np.int64) == step]
            if len(chosen):
                means[name] = float(chosen.mean())
        return means


_EMPTY = _Column()


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
