"""The rules of 2048: a square board, moves that slide and merge tiles, and a new tile after each of them.

    .  2  .  2              8  4  .  .
    4  .  4  .    left      8  .  .  .      two equal tiles that meet become one; a tile merges once in a move
    2  2  4  .   ------>    4  4  .  .
    .  .  .  .              .  .  .  2      the new tile

A board is a tuple of exponents row by row: 0 is a free cell, and k is the tile 2^k.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import NamedTuple

Cells = tuple[int, ...]
"""Exponents of the tiles, row by row: `size * size` numbers."""

MOVES = ("left", "right", "up", "down")


class Slid(NamedTuple):
    """A board after a move, before the new tile."""

    cells: Cells
    points: int
    """The sum of the tiles that merges made, as the original game counts."""


def slide(cells: Cells, move: str) -> Slid:
    """Slide all tiles in one direction and merge equal ones. The board is unchanged if nothing can move."""
    slid, points = [0] * len(cells), 0
    for line in _lines(math.isqrt(len(cells)), move):
        merged, won = _merge(tuple(cells[i] for i in line))
        points += won
        for i, exponent in zip(line, merged, strict=True):
            slid[i] = exponent
    return Slid(tuple(slid), points)


def legal_moves(cells: Cells) -> list[str]:
    """The moves that change the board. The game is over if there is none, which a full board alone does not mean."""
    return [move for move in MOVES if slide(cells, move).cells != cells]


def add_tile(cells: Cells, rng: random.Random, chance_of_4: float) -> Cells:
    """Put a 2, or a 4 with probability `chance_of_4`, on a free cell."""
    free = [i for i, exponent in enumerate(cells) if not exponent]
    chosen = free[int(rng.random() * len(free))]
    tile = 2 if rng.random() < chance_of_4 else 1
    return (*cells[:chosen], tile, *cells[chosen + 1 :])


def first_board(size: int, rng: random.Random, chance_of_4: float) -> Cells:
    """A board with two tiles, as the game begins."""
    return add_tile(add_tile((0,) * (size * size), rng, chance_of_4), rng, chance_of_4)


def points_of(tile: int) -> int:
    """The points for building a tile out of 2s alone. Example: two 4s of 4 points each make an 8, so it has 16."""
    return tile * (tile.bit_length() - 2)


def highest_possible(size: int, chance_of_4: float) -> int:
    """The highest tile that a chain of merges over all cells can make. Example: 131,072 on 4 x 4 cells, if 4s come."""
    return 1 << (size * size + (chance_of_4 > 0))


@cache
def _merge(line: Cells) -> tuple[Cells, int]:
    """Slide a line to its first cell. Example: `(1, 1, 0, 1)` becomes `(2, 1, 0, 0)`, with 4 points."""
    merged: list[int] = []
    points, is_mergeable = 0, False
    for exponent in filter(None, line):
        if is_mergeable and merged[-1] == exponent:
            merged[-1] += 1
            points += 2 ** merged[-1]
            is_mergeable = False
        else:
            merged.append(exponent)
            is_mergeable = True
    return (*merged, *[0] * (len(line) - len(merged))), points


@cache
def _lines(size: int, move: str) -> tuple[tuple[int, ...], ...]:
    """The cells of each row or column, beginning with the one that tiles slide to."""
    rows = [tuple(range(row * size, row * size + size)) for row in range(size)]
    lines = rows if move in ("left", "right") else list(zip(*rows, strict=True))
    return tuple(line if move in ("left", "up") else line[::-1] for line in lines)
