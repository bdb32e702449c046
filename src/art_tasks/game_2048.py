"""The game of 2048: slide tiles, merge equal ones, and reach the goal before the board is stuck.

    user       A.           A is 2, B is 4, C is 8: the form for tiny models
               BA
    assistant  d

A pretrained model is shown numbers and answers `<move>down</move>`; see `Game2048Options`. Each request shows only the
current board, which is all that the next move depends on, so each turn is a conversation of its own. As in the real
game, a move that changes nothing is allowed: no new tile comes, and the turn is spent. The game ends when the goal
is reached, when no move can change the board (a full board may still have moves), after too many turns, and with an
answer that is no move.

The reward is from 0 to 1, by the log of the highest tile, the log of the points, and the goal: see `reward_parts`.
An answer that is no move makes it -0.5. That is below any legal game, or a policy in trouble would have no reason to
keep to the rules.

A board is a tuple of exponents row by row: 0 is a free cell, and k is the tile 2^k.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, TaskOptions, derive_seed, take_turn
from art.trajectory import History, Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

Cells = tuple[int, ...]
"""Exponents of the tiles, row by row: `size * size` numbers."""

MOVES = ("left", "right", "up", "down")


class Slid(NamedTuple):
    """A board after a move, before the new tile."""

    cells: Cells
    points: int
    """The sum of the tiles that merges made, as the original game counts."""


def slide(cells: Cells, move: str) -> Slid:
    """Slide all tiles in one direction and merge equal ones. The board is unchanged if nothing can move.

    .  2  .  2              8  4  .  .
    4  .  4  .    left      8  .  .  .      two equal tiles that meet become one; a tile merges once in a move
    2  2  4  .   ------>    4  4  .  .
    .  .  .  .              .  .  .  .
    """
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


CHANCE_OF_4 = 0.1
"""Probability that a new tile is a 4, not a 2."""


def add_tile(cells: Cells, rng: random.Random) -> Cells:
    """Put a 2, or a 4 with probability `CHANCE_OF_4`, on a free cell."""
    free = [i for i, exponent in enumerate(cells) if not exponent]
    chosen = free[int(rng.random() * len(free))]
    tile = 2 if rng.random() < CHANCE_OF_4 else 1
    return (*cells[:chosen], tile, *cells[chosen + 1 :])


def points_of(tile: int) -> int:
    """The points for building a tile out of 2s alone. Example: two 4s of 4 points each make an 8, so it has 16."""
    return tile * (tile.bit_length() - 2)


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


_POINTS = 0.02
"""Value of a point that a merge wins, beside the value of the board."""


def best_move(cells: Cells, *, pull: float = 0.0) -> str:
    """Return the legal move after which the board, before its new tile, is best.

    Args:
        pull: how much it prefers high tiles near the lower left corner. A player with a pull of 0.2 moves left or down
            four times in five, so it is easier to imitate; it is as strong on 3 x 3 cells, and weaker on 4 x 4.

    Raises:
        ValueError: there is no legal move.
    """

    def value(move: str) -> float:
        slid, points = slide(cells, move)
        return evaluate(slid, pull) + _POINTS * points

    return max(legal_moves(cells), key=value)


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


TileSigns = Literal["numbers", "letters"]
_LONGEST_ANSWER: dict[TileSigns, int] = {"numbers": 256, "letters": 4}
_MAX_IDLE_TURNS = 5
"""Moves in a row that change nothing, after which the game ends."""


class Game2048Options(TaskOptions):
    """What a user may choose about the game of 2048."""

    size: int = Field(default=4, ge=2, le=5)
    """Cells on each side of the board."""
    goal: int = Field(default=2048, ge=8, le=131072)
    """Tile to reach, a power of 2. The game is won, and ends, with it."""
    signs: TileSigns = "numbers"
    """`numbers`: the board has numbers in columns, and a move is `<move>left</move>`, possibly after other text.
    `letters`: the board has one sign for each cell, `A` for 2, `B` for 4 and so on, and a move is the bare letter `l`
    or word `left`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens. By default 4 for a letter, and 256 for XML. A model that thinks before it answers needs
    more."""

    @property
    def answer_limit(self) -> int:
        return self.max_completion_tokens or _LONGEST_ANSWER[self.signs]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.goal & (self.goal - 1):
            raise ValueError(f"goal must be a power of 2 such as 64 or 2048, got {self.goal}")
        highest = 1 << (self.size**2 + 1)  # by a chain of merges over all cells
        if self.goal > highest:
            raise ValueError(
                f"goal {self.goal} does not fit on a board of {self.size} x {self.size}: its highest possible tile is "
                f"{highest}; take a lower goal or a larger size"
            )
        return self


TILE_SHARE, POINTS_SHARE, GOAL_SHARE = 0.5, 0.25, 0.25
"""Shares of the parts of the reward; a game that reaches the goal has nearly all of each."""
INVALID_REWARD = -0.5
"""Reward of a game that ends with an answer that is no move. A legal game has 0 or more."""
ENDINGS = ("goal", "no_legal_move", "out_of_turns", "idle", "context_full", "invalid_move")
"""How a game ends: the goal was reached, the board is stuck, too many turns or idle moves, no room, a bad answer."""


@dataclass(slots=True, kw_only=True)
class TileGame:
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
        for _ in range(2):
            self.cells = add_tile(self.cells or (0,) * self.options.size**2, rng)

    @property
    def highest_tile(self) -> int:
        return int(2 ** max(self.cells))

    def play(self, move: str) -> bool:
        """Make a move, and return whether it changed the board. If not, there is no new tile, but the turn is gone."""
        slid, points = slide(self.cells, move)
        moved = slid != self.cells
        if moved:
            self.num_moves, self.idle_in_a_row, self.points = self.num_moves + 1, 0, self.points + points
            self.cells = add_tile(slid, random.Random(derive_seed(self.seed, self.num_moves)))
        else:
            self.num_idle, self.idle_in_a_row = self.num_idle + 1, self.idle_in_a_row + 1
        reached = f"the highest tile was {self.highest_tile}"
        if self.highest_tile >= self.options.goal:
            self.end("goal", f"reached {self.highest_tile} in {self.num_moves} moves")
        elif not legal_moves(self.cells):
            self.end("no_legal_move", f"no move was possible after {self.num_moves} moves; {reached}")
        elif self.idle_in_a_row >= _MAX_IDLE_TURNS:
            self.end("idle", f"{self.idle_in_a_row} moves in a row changed nothing; {reached}")
        elif self.num_moves + self.num_idle >= self.options.goal:  # twice what a game needs
            self.end("out_of_turns", f"the game stopped after {self.options.goal} turns; {reached}")
        return moved

    def end(self, ending: str, why: str) -> None:
        self.ending, self.why = ending, why

    def parts(self) -> dict[str, float]:
        """The parts of the reward by their names: what was reached, or only the price of an answer that is no move."""
        parts = reward_parts(self.highest_tile, self.points, self.options.goal)
        if self.ending == "invalid_move":
            return dict.fromkeys(parts, 0.0) | {"invalid": INVALID_REWARD}
        return parts | {"invalid": 0.0}


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


FREE = "."
_SHORT = {move[0]: move for move in MOVES}
_TAG = re.compile(r"<move>\s*(\w+)\s*</move>")
_ASKS: dict[TileSigns, str] = {
    "numbers": "Answer with one move: <move>left</move>, <move>right</move>, <move>up</move> or <move>down</move>.",
    "letters": "Answer with one letter: l for left, r for right, u for up or d for down.",
}


def system_prompt(options: Game2048Options) -> str:
    """Write the rules, the goal, and how the agent answers."""
    size, goal = options.size, options.goal
    lines = [
        f"You play 2048 on a board of {size} x {size}. A move slides all tiles left, right, up or down.",
        "Two equal tiles that meet become one of twice the value. A tile merges once in a move.",
        "After a move that changed the board a new tile, 2 or 4, comes to a free cell.",
        f"Reach the tile {goal}. The game is lost when no move can change the board.",
    ]
    if options.signs == "letters":
        letters = ", ".join(f"{_letter(i)} is {2**i}" for i in range(1, goal.bit_length()))
        lines.append(f"A dot is a free cell, and tiles are letters: {letters}.")
    else:
        lines.append("A dot is a free cell.")
    return "\n".join([*lines, _ASKS[options.signs]])


def show(cells: Cells, options: Game2048Options) -> str:
    """Write a board. Example of numbers: `   2    .`; of letters: `A.`."""
    if options.signs == "letters":
        signs = [_letter(exponent) for exponent in cells]
        separator = ""
    else:
        width = len(str(options.goal))
        signs = [f"{2**exponent if exponent else FREE:>{width}}" for exponent in cells]
        separator = " "
    rows = (signs[i : i + options.size] for i in range(0, len(signs), options.size))
    return "\n".join(separator.join(row) for row in rows)


def read_board(text: str, options: Game2048Options) -> Cells:
    """Read the board in a message that `show_turn` wrote."""
    lines = text.splitlines()[-options.size :]
    if options.signs == "letters":
        return tuple(0 if sign == FREE else ord(sign) - ord("A") + 1 for line in lines for sign in line)
    return tuple(0 if sign == FREE else int(math.log2(int(sign))) for line in lines for sign in line.split())


def _letter(exponent: int) -> str:
    return chr(ord("A") + exponent - 1) if exponent else FREE


def show_turn(cells: Cells, idle_move: str | None, options: Game2048Options) -> str:
    """Write what the agent is shown: the board, and before it the last move if that changed nothing."""
    board = show(cells, options)
    return board if idle_move is None else f"Nothing moved {idle_move}.\n{board}"


def read_move(message: Any, signs: TileSigns) -> str | None:
    """The move in an assistant's message; `None` unless it names exactly one, in the way that was asked for.

    Example: with `letters`, "u" and "up" are `up`, and "u!", "go up" and "" give `None`.
    """
    text = str(message.content or "").strip().lower()
    if signs == "letters":
        word = _SHORT.get(text, text)
    else:
        named = _TAG.findall(text)
        word = named[0] if len(named) == 1 else ""
    return word if word in MOVES else None


def say_move(move: str, signs: TileSigns) -> dict[str, Any]:
    """The assistant's message with a move. Example: `{"role": "assistant", "content": "u"}`."""
    return {"role": "assistant", "content": move[0] if signs == "letters" else f"<move>{move}</move>"}


_SPLITS: Mapping[int, Split] = {8: "val", 9: "test"}  # by the last digit of a game's seed; the others are for training
_PULL = 0.2
"""How much the player of the warm start prefers the lower left corner."""
_SHOWN_TURNS = 8
"""Turns of a warm-start conversation: single turns of one game, each with its own board."""


class Game2048(Task):
    """A task: play 2048.

    A tiny model plays on 2 x 2 cells until the tile 16, with one letter for each tile and move, about 8 moves a game.
    Random legal play wins 13 % of these games and the player 92 %. A tiny model cannot learn the full
    game: 800 moves take minutes to sample, and on 3 x 3 cells a warm start of 600 steps left it at random play.
    """

    name: ClassVar[str] = "game_2048"
    description: ClassVar[str] = "play the game of 2048"
    headline_metric: ClassVar[str] = "goal"
    options_class: ClassVar[type[Game2048Options]] = Game2048Options
    options: Game2048Options
    tiny_options: ClassVar[Mapping[str, Any]] = {"size": 2, "goal": 16, "signs": "letters"}
    rubric: ClassVar[str | None] = (
        "A good game of 2048 keeps to the rules in every turn, wastes no turn on a move that changes nothing, and "
        "reaches a high tile. Each doubling of the highest tile is worth as much as the one before it, and reaching "
        "the goal is best. Among games with the same highest tile, more points are better. A game that ends with an "
        "answer that is no move is worse than any other. The last message says how the game ended. Judge the result, "
        "not the style."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(warm_start_steps=200)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` games. A game is a number, from which its first board and its new tiles follow."""
        rng = random.Random(derive_seed(self.name, split, seed))
        games = [self._draw_game(split, rng) for _ in range(count)]
        return [self.scenario(split, seed, index, {"game": game}) for index, game in enumerate(games)]

    @staticmethod
    def _draw_game(split: Split, rng: random.Random) -> int:
        while _SPLITS.get((game := rng.getrandbits(48)) % 10, "train") != split:
            pass
        return game

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        options, game = self.options, TileGame(options=self.options, seed=scenario.inputs["game"])
        opening: list[Any] = [{"role": "system", "content": system_prompt(options)}]
        trajectory = Trajectory(
            messages_and_choices=[*opening, _user(show_turn(game.cells, None, options))],
            metadata={"scenario_id": scenario.id},
        )  # fmt: skip
        while game.ending is None:
            calls = await take_turn(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=options.answer_limit,
                seed=derive_seed(scenario.seed, rollout_index, game.num_moves + game.num_idle),
            )  # fmt: skip
            if calls == "context_full":
                game.end("context_full", "the conversation filled the model's context")
                break
            message = trajectory.messages_and_choices[-1].message  # type: ignore[union-attr]
            move = None if calls == "cut_short" else read_move(message, options.signs)
            if move is None:
                what = "was cut short before a move" if calls == "cut_short" else "is no move"
                game.end("invalid_move", f"the answer {str(message.content or '')[:60]!r} {what}")
                break
            moved = game.play(move)
            if game.ending is None:
                # The turn just played becomes a further conversation, which is trained with the game's reward too.
                trajectory.additional_histories.append(History(messages_and_choices=trajectory.messages_and_choices))
                shown = show_turn(game.cells, None if moved else move, options)
                trajectory.messages_and_choices = [*opening, _user(shown)]
        if game.ending != "invalid_move":  # for judges and people: the model is not asked again
            over = f"Game over: {game.why}; points: {game.points}, highest tile: {game.highest_tile}."
            trajectory.messages_and_choices.append(_user(f"{over}\n{show(game.cells, options)}"))
        parts = game.parts()
        trajectory.reward = sum(parts.values())
        trajectory.metrics |= {name: float(name == game.ending) for name in ENDINGS}
        trajectory.metrics |= {f"reward/{name}": value for name, value in parts.items()}
        trajectory.metrics |= {
            "log2_highest_tile": max(game.cells), "points": game.points, "num_moves": game.num_moves,
            "num_idle_moves": game.num_idle,
        }  # fmt: skip
        trajectory.metadata |= {"outcome": "policy_fault" if game.ending == "invalid_move" else "ok", "why": game.why}
        return trajectory

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A player who moves to the best board."""

        def answer(messages: Any, tools: Any) -> dict[str, Any]:
            cells = read_board(str(messages[-1]["content"]), self.options)
            move = best_move(cells)
            return say_move(move, self.options.signs)

        return answer

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make turns of a game. A move is the expert's with probability `skill`, else any legal one."""
        game = TileGame(options=self.options, seed=self._draw_game("train", rng))
        turns: list[tuple[str, str]] = []
        while game.ending is None:
            good = best_move(game.cells, pull=_PULL)
            move = good if rng.random() < skill else rng.choice(legal_moves(game.cells))
            turns.append((show_turn(game.cells, None, self.options), move))
            game.play(move)
        messages: list[Any] = [{"role": "system", "content": system_prompt(self.options)}]
        for shown, move in rng.sample(turns, min(len(turns), _SHOWN_TURNS)):
            messages += [_user(shown), say_move(move, self.options.signs)]
        return Conversation(messages=messages)

    def render_trajectory(self, trajectory: Trajectory) -> str:
        """Show the boards, each with the answer that follows it."""
        messages = [m for h in (*trajectory.additional_histories, trajectory) for m in h.messages()]
        shown = [str(m["content"]) for m in messages if m["role"] != "system"]
        return "\n\n".join([*shown, f"{trajectory.metadata.get('why')}, reward {trajectory.reward:.2f}"])


def _user(text: str) -> Any:
    return {"role": "user", "content": text}
