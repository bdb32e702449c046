"""The texts of a game of 2048: system prompt, board, answers with a move, and the last message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from art.tasks.game_2048.board import MOVES, Cells, legal_moves
from art.tasks.game_2048.game_options import Game2048Options, Moves
from art.trajectory import Trajectory

FREE = "."
_SHORT = {move[0]: move for move in MOVES}
_TAG = re.compile(r"<move>\s*(\w+)\s*</move>")
_IDLE, _OVER, _CAN_MOVE = "Nothing moved ", "Game over: ", "Moves: "
_END = re.compile(rf"{_OVER}.*; points: (\d+), highest tile: (\d+)\.")
_ASKS: dict[Moves, str] = {
    "xml": "Answer with one move: <move>left</move>, <move>right</move>, <move>up</move> or <move>down</move>.",
    "tool": "Make one move in each turn by calling the tool `move`.",
    "letter": "Answer with one letter: l for left, r for right, u for up or d for down.",
}
MOVE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Slide all tiles in one direction",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
            "required": ["direction"],
        },
    },
}


def tools_of(options: Game2048Options) -> list[Any] | None:
    """Return the tools of a request; `None` unless moves are calls."""
    return [MOVE_TOOL] if options.moves == "tool" else None


def system_prompt(options: Game2048Options) -> str:
    """Write the rules, the goal, and how the agent answers."""
    size, goal = options.size, options.goal
    lines = [
        f"You play 2048 on a board of {size} x {size}. A move slides all tiles left, right, up or down.",
        "Two equal tiles that meet become one of twice the value. A tile merges once in a move.",
        "After a move that changed the board a new tile, 2 or 4, comes to a free cell.",
        f"Reach the tile {goal}. The game is lost when no move can change the board.",
    ]
    if options.board == "letters":
        letters = ", ".join(f"{_letter(i)} is {2**i}" for i in range(1, goal.bit_length()))
        lines.append(f"A dot is a free cell, and tiles are letters: {letters}.")
    else:
        lines.append("A dot is a free cell.")
    return "\n".join([*lines, _ASKS[options.moves]])


def show(cells: Cells, options: Game2048Options) -> str:
    """Write a board. Example of numbers: `   2    .`; of letters: `A.`."""
    if options.board == "letters":
        signs = [_letter(exponent) for exponent in cells]
        separator = ""
    else:
        width = len(str(options.goal))
        signs = [f"{2**exponent if exponent else FREE:>{width}}" for exponent in cells]
        separator = " "
    rows = (signs[i : i + options.size] for i in range(0, len(signs), options.size))
    return "\n".join(separator.join(row) for row in rows)


def board_lines(text: str, options: Game2048Options) -> list[str]:
    """The lines of the board in a message that `show_turn` or `show_end` wrote."""
    lines = [line for line in text.splitlines() if not line.startswith((_IDLE, _OVER, _CAN_MOVE))]
    return lines[-options.size :]


def read_board(text: str, options: Game2048Options) -> Cells:
    """Read the board in a message that `show_turn` wrote."""
    lines = board_lines(text, options)
    if options.board == "letters":
        return tuple(0 if sign == FREE else ord(sign) - ord("A") + 1 for line in lines for sign in line)
    return tuple(0 if sign == FREE else int(math.log2(int(sign))) for line in lines for sign in line.split())


def _letter(exponent: int) -> str:
    return chr(ord("A") + exponent - 1) if exponent else FREE


def show_turn(cells: Cells, idle_move: str | None, options: Game2048Options) -> str:
    """Write what the agent is shown: the board, and before it the last move if that changed nothing."""
    lines = [show(cells, options)]
    if idle_move is not None:
        lines.insert(0, f"{_IDLE}{idle_move}.")
    if options.show_moves:
        moves = legal_moves(cells)
        lines.append(_CAN_MOVE + (" ".join(m[0] for m in moves) if options.moves == "letter" else ", ".join(moves)))
    return "\n".join(lines)


def show_end(cells: Cells, why: str, points: int, options: Game2048Options) -> str:
    """Write the last message, for judges and people: the model is not asked again."""
    return f"{_OVER}{why}; points: {points}, highest tile: {2 ** max(cells)}.\n{show(cells, options)}"


def read_end(text: str) -> tuple[int, int] | None:
    """Points and highest tile out of the text of `show_end`; `None` if it is another text."""
    match = _END.match(text)
    return (int(match[1]), int(match[2])) if match else None


def read_move(message: Any, moves: Moves) -> str | None:
    """The move in an assistant's message; `None` unless it names exactly one, in the way that was asked for.

    Example: with `letter`, "u" and "up" are `up`, and "u!", "go up" and "" give `None`.
    """
    if moves == "tool":
        return _read_call(message.tool_calls)
    text = str(message.content or "").strip().lower()
    if moves == "letter":
        word = _SHORT.get(text, text)
    else:
        named = _TAG.findall(text)
        word = named[0] if len(named) == 1 else ""
    return word if word in MOVES else None


def _read_call(calls: Any) -> str | None:
    try:
        (call,) = calls
        word = json.loads(call.function.arguments)["direction"]
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    return word if call.function.name == "move" and word in MOVES else None


def say_move(move: str, moves: Moves) -> dict[str, Any]:
    """The assistant's message with a move. Example: `{"role": "assistant", "content": "u"}`."""
    if moves == "tool":
        function = {"name": "move", "arguments": json.dumps({"direction": move})}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": "assistant", "content": move[0] if moves == "letter" else f"<move>{move}</move>"}


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
