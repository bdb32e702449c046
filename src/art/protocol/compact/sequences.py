"""Sequences of numbers that look like lists and take little memory: arrays, made one at a time when they are read.

A step may have 20 million numbers in its samples and a few hundred thousand that differ from 0 or from the tokens of
another sample. `ArraySequence` is what such forms have in common; `SpanValues` is the one of masks and log-probs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class ArraySequence(Sequence[Any]):
    """A sequence that is computed as an array. It equals a list of the same numbers, and its slices are lists."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # like a list

    @abstractmethod
    def array(self) -> NDArray[Any]:
        """Make an array of the whole sequence. Nothing keeps it."""

    def __getitem__(self, index: Any) -> Any:
        return self.array()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and self.array().tolist() == list(other)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole = self.array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class SpanValues(ArraySequence):
    """A sequence of `size` values that are 0 (or False) outside of some spans.

    Example: size 8, spans [[3, 5], [6, 8]], values [a, a, b, b] is 0 0 0 a a 0 b b.
    """

    __slots__ = ("size", "spans", "values")

    def __init__(self, size: int, spans: IntArray, values: NDArray[Any]) -> None:
        """
        Args:
            spans: [K, 2] begin and end of each span, ascending.
            values: [N] the values inside of the spans, one after the other.
        """
        self.size, self.spans, self.values = size, spans, values

    def __len__(self) -> int:
        return self.size

    def array(self) -> NDArray[Any]:
        whole = np.zeros(self.size, dtype=self.values.dtype)
        done = 0
        for start, end in self.spans.tolist():
            whole[start:end] = self.values[done : done + end - start]
            done += end - start
        return whole


def spans_of(mask: Sequence[bool]) -> IntArray:
    """Find the runs of true values: begin and end of each, [K, 2].

    Example: [False, True, True, False, True] gives [[1, 3], [4, 5]].
    """
    if isinstance(mask, SpanValues) and mask.values.all():
        return mask.spans
    edges = np.diff(np.concatenate([[False], np.asarray(mask, dtype=np.bool_), [False]]).astype(np.int8))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], axis=1)
