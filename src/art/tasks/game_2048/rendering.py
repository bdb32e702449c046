"""A game of 2048 as text for people: its boards beside each other, with the move that follows each.

. B .     . . A
A . A     A . .
C B .     C C A
down      left
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from art.tasks.game_2048.board import MOVES
from art.tasks.game_2048.formats import board_lines
from art.tasks.game_2048.game_options import Game2048Options
from art.trajectory import Trajectory

_GAP = "   "
_WIDTH = 96
"""Widest line, in characters."""


def render_game(trajectory: Trajectory, options: Game2048Options) -> list[str]:
    """Draw all boards that a game's agent was shown, in rows, and the last board."""
    histories = (*trajectory.additional_histories, trajectory)
    columns: list[list[str]] = []
    for message in (message for history in histories for message in history.messages()):
        if message["role"] == "assistant":
            columns[-1].append(_said(message))
        elif message["role"] in ("user", "tool"):
            columns.append(board_lines(str(message["content"]), options))
    width = max(len(line) for column in columns for line in column)
    per_row = max(1, (_WIDTH + len(_GAP)) // (width + len(_GAP)))
    rows = [columns[i : i + per_row] for i in range(0, len(columns), per_row)]
    return [line for row in rows for line in _beside(row, width, options.size + 1)]


def _beside(columns: Iterable[list[str]], width: int, height: int) -> list[str]:
    filled = [column + [""] * (height - len(column)) for column in columns]
    return [_GAP.join(f"{line:<{width}}" for line in lines).rstrip() for lines in zip(*filled, strict=True)] + [""]


def _said(message: Any) -> str:
    """An answer in a few signs: the move that it names, or its beginning."""
    text = str(message.get("content") or "") + "".join(
        c["function"]["arguments"] for c in message.get("tool_calls") or ()
    )
    named = [move for move in MOVES if re.search(rf"\b{move}\b", text)]
    return named[0] if len(named) == 1 else text[:12]
