"""A player of 2048 by expectimax: it takes the move with the best expected board over the tiles that may come."""

from __future__ import annotations

import itertools
import math
from functools import cache

from art.tasks.game_2048.board import MOVES, Cells, slide

_LOST = -50.0
"""Value of a board without a legal move, below that of any other."""
_POINTS = 0.02
"""Value of a point that a merge wins, beside the value of the board."""


def best_move(cells: Cells, *, depth: int, chance_of_4: float, pull: float = 0.0) -> str:
    """Return the best legal move.

    Args:
        depth: number of new tiles to look ahead; 0 judges the boards right after the moves.
        pull: how much it prefers high tiles near the lower left corner. A player with a pull of 0.2 moves left or down
            four times in five, so it is easier to imitate; it is as strong on 3 x 3 cells, and weaker on 4 x 4.

    Raises:
        ValueError: there is no legal move.
    """
    values = {move: _value_of(cells, move, depth, chance_of_4, pull) for move in MOVES}
    legal = {move: value for move, value in values.items() if value is not None}
    if not legal:
        raise ValueError(f"no move is legal on {cells}")
    return max(legal, key=lambda move: legal[move])


def _value_of(cells: Cells, move: str, depth: int, chance_of_4: float, pull: float) -> float | None:
    """The value of a move, `None` if it is not legal."""
    slid, points = slide(cells, move)
    if slid == cells:
        return None
    board = evaluate(slid, pull) if depth == 0 else _expect(slid, depth, chance_of_4, pull)
    return board + _POINTS * points


def _expect(slid: Cells, depth: int, chance_of_4: float, pull: float) -> float:
    """The mean value over all places and numbers of the next tile, if the best move follows each."""
    free = [i for i, exponent in enumerate(slid) if not exponent]
    total = 0.0
    for i in free:
        for tile, chance in ((1, 1 - chance_of_4), (2, chance_of_4)):
            if chance:
                cells = (*slid[:i], tile, *slid[i + 1 :])
                values = (_value_of(cells, move, depth - 1, chance_of_4, pull) for move in MOVES)
                total += chance * max((value for value in values if value is not None), default=_LOST)
    return total / len(free)


def evaluate(cells: Cells, pull: float = 0.0) -> float:
    """Judge a board: free cells, equal neighbours, tiles in order and the highest in a corner are good."""
    size = math.isqrt(len(cells))
    rows = [cells[i : i + size] for i in range(0, len(cells), size)]
    value = sum(map(_evaluate_line, rows)) + sum(map(_evaluate_line, zip(*rows, strict=True)))
    highest = max(cells)
    corners = (cells[0], cells[size - 1], cells[-size], cells[-1])
    pulled = pull * sum(e * (r - c) for r, row in enumerate(rows) for c, e in enumerate(row)) if pull else 0.0
    return value + pulled + (0.6 * highest if highest in corners else 0.0)


@cache
def _evaluate_line(line: Cells) -> float:
    pairs = [(a, b) for a, b in itertools.pairwise(line) if a and b]
    rises = sum(max(b - a, 0) for a, b in itertools.pairwise(line))
    falls = sum(max(a - b, 0) for a, b in itertools.pairwise(line))
    steps = sum(abs(a - b) for a, b in pairs)
    return line.count(0) + 0.7 * sum(a == b for a, b in pairs) - 0.5 * steps - 0.5 * min(rises, falls)
