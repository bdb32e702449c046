"""The tokens of many samples, in which every shared prefix is there once.

The paths are sorted by their tokens. Each adds what it does not share with the paths before it:

    paths        5 6 7 8 | 1     5 6 9 | 2     5 6 7 3 3 | 4        before the bar: what is laid out as a tree
    sorted       5 6 7 3 3       5 6 7 8       5 6 9
    tokens       5 6 7 3 3       8             9
    runs         [0, 5]          [0, 3] [5, 6] [0, 2] [6, 7]
    shared       0               3             2
    rests        4               1             2

A path's *inputs* are its tokens up to the last one that predicts a target; only they are sorted and shared, since they
are what a model computes. The *rest* is the last target, and whatever comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from art.protocol.compact.sequences import ArraySequence, IntArray

TokenArray = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLayout:
    """The tokens of S paths, sorted by their inputs. A path is named by its *rank*, its place in this order."""

    tokens: TokenArray  # [U] the inputs of all paths, shared ones once
    runs: IntArray  # [K, 2] begin and end in `tokens` of each piece of a path
    first_run: IntArray  # [S + 1] the pieces of path r are runs[first_run[r] : first_run[r + 1]]
    shared: IntArray  # [S] number of leading tokens that each path shares with the one before it
    rests: TokenArray  # [R] tokens after the inputs, path by path
    first_rest: IntArray  # [S + 1]
    num_inputs: IntArray  # [S]

    def inputs(self, rank: int) -> TokenArray:
        pieces = self.runs[self.first_run[rank] : self.first_run[rank + 1]].tolist()
        if len(pieces) == 1:
            return self.tokens[slice(*pieces[0])]
        return np.concatenate([self.tokens[start:end] for start, end in pieces] or [self.tokens[:0]])

    def rest(self, rank: int) -> TokenArray:
        return self.rests[self.first_rest[rank] : self.first_rest[rank + 1]]


class TokenPath(ArraySequence):
    """The tokens of one sample, as the path of a rank in a layout that it shares with other samples."""

    __slots__ = ("layout", "rank")

    def __init__(self, layout: TokenLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank

    @property
    def num_inputs(self) -> int:
        return int(self.layout.num_inputs[self.rank])

    def __len__(self) -> int:
        first = self.layout.first_rest
        return self.num_inputs + int(first[self.rank + 1] - first[self.rank])

    def array(self) -> TokenArray:
        return np.concatenate([self.layout.inputs(self.rank), self.layout.rest(self.rank)])


def sort_ranks(paths: Sequence[TokenPath]) -> tuple[list[int], list[int]] | None:
    """Sort paths of one layout. Return their order, and how many inputs each shares with the path before it.

    `None` if they are not distinct paths of one layout.
    """
    layout = paths[0].layout
    if any(path.layout is not layout for path in paths):
        return None
    ranks = np.asarray([path.rank for path in paths])
    order = np.argsort(ranks)
    ranks = ranks[order]
    if (ranks[1:] == ranks[:-1]).any():
        return None
    # Two paths share the minimum of what the neighbours between them share.
    shared = np.minimum.reduceat(np.append(layout.shared, 0), ranks + 1)
    return order.tolist(), [0, *shared[:-1].tolist()]
