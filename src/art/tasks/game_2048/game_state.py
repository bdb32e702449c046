"""One game of 2048: its board, what was played, and how it ended."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from art.task import derive_seed
from art.tasks.game_2048.board import Cells, add_tile, first_board, legal_moves, points_of, slide
from art.tasks.game_2048.game_options import Game2048Options

TILE_SHARE, POINTS_SHARE, GOAL_SHARE = 0.5, 0.25, 0.25
"""Shares of the parts of the reward; a game that reaches the goal has nearly all of each."""
INVALID_REWARD = -0.5
"""Reward of a game that ends with an answer that is no move. A legal game has 0 or more."""
ENDINGS = ("goal", "no_legal_move", "out_of_turns", "idle", "context_full", "invalid_move")
"""How a game ends: the goal was reached, the board is stuck, too many turns or idle moves, no room, a bad answer."""


@dataclass(slots=True, kw_only=True)
class Game:
    """One game. The new tiles follow from `seed` and the number of tiles so far: the same moves meet the same tiles."""

    options: Game2048Options
    seed: int
    cells: Cells = ()
    points: int = 0
    num_moves: int = 0
    """Moves that changed the board."""
    num_idle: int = 0
    """Moves that changed nothing."""
    idle_in_a_row: int = 0
    """Moves since the last one that changed something."""
    ending: str | None = None
    """One of `ENDINGS`; `None` while the game goes on."""
    why: str = ""
    """The ending in a sentence."""

    def __post_init__(self) -> None:
        rng = random.Random(derive_seed(self.seed, "first"))
        self.cells = first_board(self.options.size, rng, self.options.chance_of_4)

    @property
    def highest_tile(self) -> int:
        return int(2 ** max(self.cells))

    def play(self, move: str) -> bool:
        """Make a move, and return whether it changed the board. If not, there is no new tile, but the turn is gone."""
        slid, points = slide(self.cells, move)
        moved = slid != self.cells
        if moved:
            self.num_moves, self.idle_in_a_row, self.points = self.num_moves + 1, 0, self.points + points
            rng = random.Random(derive_seed(self.seed, self.num_moves))
            self.cells = add_tile(slid, rng, self.options.chance_of_4)
        else:
            self.num_idle, self.idle_in_a_row = self.num_idle + 1, self.idle_in_a_row + 1
        self._check_ending()
        return moved

    def _check_ending(self) -> None:
        reached = f"the highest tile was {self.highest_tile}"
        if self.highest_tile >= self.options.goal:
            self.end("goal", f"reached {self.highest_tile} in {self.num_moves} moves")
        elif not legal_moves(self.cells):
            self.end("no_legal_move", f"no move was possible after {self.num_moves} moves; {reached}")
        elif self.idle_in_a_row >= self.options.max_idle_turns:
            self.end("idle", f"{self.idle_in_a_row} moves in a row changed nothing; {reached}")
        elif self.num_moves + self.num_idle >= self.options.turn_limit:
            self.end("out_of_turns", f"the game stopped after {self.options.turn_limit} turns; {reached}")

    def end(self, ending: str, why: str) -> None:
        self.ending, self.why = ending, why

    def parts(self) -> dict[str, float]:
        """The parts of the reward by their names: what was reached, or only the price of an answer that is no move."""
        parts = reward_parts(self.highest_tile, self.points, self.options.goal)
        if self.ending == "invalid_move":
            return dict.fromkeys(parts, 0.0) | {"invalid": INVALID_REWARD}
        return parts | {"invalid": 0.0}

    @property
    def reward(self) -> float:
        return sum(self.parts().values())


def reward_parts(highest_tile: int, points: int, goal: int) -> dict[str, float]:
    """The parts of the reward by their names.

    Each doubling of the highest tile takes about twice the moves and is about as hard as the one before it, so the
    reward grows by the same amount with each: the tile's part is proportional to log2(highest / 2). The points tell
    games with the same highest tile apart; they double with the tile, so their part is a log too, compared with the
    points for building the goal out of 2s alone. The goal itself counts once more, since it is what the agent is
    measured by.

    Example: 32 of 64 with 128 points is `{"tile": 0.4, "points": 0.21, "goal": 0.0}`, rounded.
    """
    steps = math.log2(min(highest_tile, goal)) - 1
    won = math.log(1 + points) / math.log(1 + points_of(goal))
    return {
        "tile": TILE_SHARE * steps / (math.log2(goal) - 1),
        "points": POINTS_SHARE * min(won, 1.0),
        "goal": GOAL_SHARE * (highest_tile >= goal),
    }
