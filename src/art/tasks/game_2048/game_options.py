"""What a user may choose about the game of 2048."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from art.task import TaskOptions
from art.tasks.game_2048.board import highest_possible

Moves = Literal["xml", "tool", "letter"]
_LONGEST_ANSWER: dict[Moves, int] = {"xml": 256, "tool": 256, "letter": 4}


class Game2048Options(TaskOptions):
    """What a user may choose about the game of 2048."""

    size: int = Field(default=4, ge=2, le=5)
    """Cells on each side of the board."""
    goal: int = Field(default=2048, ge=8, le=131072)
    """Tile to reach, a power of 2. The game is won, and ends, with it."""
    chance_of_4: float = Field(default=0.1, ge=0, le=1)
    """Probability that a new tile is a 4, not a 2."""
    moves: Moves = "xml"
    """How the agent names a move: `<move>left</move>`, possibly after other text; a call of the tool `move`; or the
    bare word `left` or its letter `l`."""
    board: Literal["numbers", "letters"] = "numbers"
    """How the board is shown: numbers in columns; or one sign for each cell, `A` for 2, `B` for 4, and so on."""
    show_moves: bool = False
    """List the moves that change the board below it. Without it the agent has to see that for itself."""
    history: Literal["last", "all"] = "last"
    """What a request shows: only the current board, which is all that the next move depends on; or the conversation
    with all boards and moves."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of a game. By default the number of the goal: 2048 turns for the tile 2048, twice what a game needs."""
    max_idle_turns: int = Field(default=5, ge=1)
    """Moves in a row that change nothing, after which the game ends."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens. By default 4 for a letter, and 256 for XML or a tool call. A model that thinks before
    it answers needs more."""

    @property
    def turn_limit(self) -> int:
        return self.goal if self.max_turns is None else self.max_turns

    @property
    def answer_limit(self) -> int:
        return self.max_completion_tokens or _LONGEST_ANSWER[self.moves]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.goal & (self.goal - 1):
            raise ValueError(f"goal must be a power of 2 such as 64 or 2048, got {self.goal}")
        highest = highest_possible(self.size, self.chance_of_4)
        if self.goal > highest:
            raise ValueError(
                f"goal {self.goal} does not fit on a board of {self.size} x {self.size}: its highest possible tile is "
                f"{highest}; take a lower goal or a larger size"
            )
        return self
