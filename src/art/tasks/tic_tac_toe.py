"""Tic-tac-toe against an opponent that plays at random, one message per move. The policy plays X and begins.

    user       1O3        a free cell shows its number
               4X6
               78O
    assistant  7

The reward is 1 for a win, 0.5 for a draw and 0 for a loss. An illegal answer ends the game with -0.5. It must be worse
than a loss, or a policy that is about to lose has no reason to keep to the rules. A perfect player wins 99 of 100
games, a random one 58. An opponent with some skill is harder: `-o opponent_skill=0.5`.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, TaskOptions, derive_seed, sample_answer
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

FREE, POLICY, OPPONENT = ".", "X", "O"
REWARDS = {"win": 1.0, "draw": 0.5, "loss": 0.0, "invalid_move": -0.5}
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_SYSTEM = "You play X. Answer with the number of a free cell."
_MAX_COMPLETION_TOKENS = 4
"""A move is one token and the end of the turn another. A few more show when a policy writes too much."""


class Board:
    """A tic-tac-toe board: nine cells, counted from 0 row by row."""

    def __init__(self) -> None:
        self.cells = [FREE] * 9

    def free_cells(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell == FREE]

    def place(self, cell: int, mark: str) -> None:
        if self.cells[cell] != FREE:
            raise ValueError(f"cell {cell} of {''.join(self.cells)} is taken")
        self.cells[cell] = mark

    def outcome(self) -> str | None:
        """`win`, `loss` or `draw` for the policy; `None` while the game goes on."""
        for a, b, c in _LINES:
            if self.cells[a] != FREE and self.cells[a] == self.cells[b] == self.cells[c]:
                return "win" if self.cells[a] == POLICY else "loss"
        return None if FREE in self.cells else "draw"

    def __str__(self) -> str:
        shown = [str(i + 1) if cell == FREE else cell for i, cell in enumerate(self.cells)]
        return "\n".join("".join(shown[row : row + 3]) for row in (0, 3, 6))


class TicTacToeOptions(TaskOptions):
    """What a user may choose about tic-tac-toe."""

    opponent_skill: float = Field(default=0.0, ge=0, le=1)
    """Probability that a move of the opponent is good: it completes its line, or else blocks one. Other moves are
    random."""


class TicTacToe(Task):
    """A task: play tic-tac-toe as X against an opponent that moves at random."""

    name: ClassVar[str] = "tic_tac_toe"
    description: ClassVar[str] = "tic-tac-toe against an opponent that plays at random"
    headline_metric: ClassVar[str] = "win"
    options_class: ClassVar[type[TicTacToeOptions]] = TicTacToeOptions
    options: TicTacToeOptions
    rubric: ClassVar[str | None] = (
        "A good game of tic-tac-toe is won by X: three X in a row, a column or a diagonal. A draw is less good, a loss "
        "is bad, and a game that ends with an answer that is not the number of a free cell is worst. Judge the result "
        "of the game, not single moves."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=40, warm_start_steps=200)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Make `count` games. Each starts with an empty board; they differ in the opponent's random moves."""
        return [self.scenario(split, seed, index, {}) for index in range(count)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        opponent = random.Random(derive_seed(scenario.seed, rollout_index, "opponent"))
        trajectory = Trajectory(
            messages_and_choices=[{"role": "system", "content": _SYSTEM}], metadata={"scenario_id": scenario.id}
        )
        board, num_moves, outcome = Board(), 0, None
        while outcome is None:
            trajectory.messages_and_choices.append({"role": "user", "content": str(board)})
            choice = await sample_answer(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=_MAX_COMPLETION_TOKENS,
                seed=derive_seed(scenario.seed, rollout_index, num_moves),
            )  # fmt: skip
            cell = parse_move(choice.message.content, board)
            num_moves += 1
            if cell is None:
                outcome = "invalid_move"
            else:
                outcome = play_round(board, cell, opponent, skill=self.options.opponent_skill)
        trajectory.reward = REWARDS[outcome]
        why = f"{(choice.message.content or '')[:40]!r} is not the number of a free cell" if cell is None else outcome
        trajectory.metadata |= {"why": why, "outcome": "policy_fault" if cell is None else "ok"}
        trajectory.metrics |= {name: float(name == outcome) for name in REWARDS} | {"num_moves": num_moves}
        return trajectory

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A perfect player, which among equal moves prefers the one that wins most often against random moves."""
        return lambda messages, tools: {"content": str(_best_cell(str(messages[-1]["content"])) + 1)}

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make a scripted game for the warm start. A move is good with probability `skill`, else random."""
        messages: list[Any] = [{"role": "system", "content": _SYSTEM}]
        board = Board()
        while board.outcome() is None:
            cell = _good_cell(board, POLICY) if rng.random() < skill else None
            cell = rng.choice(board.free_cells()) if cell is None else cell
            messages += [{"role": "user", "content": str(board)}, {"role": "assistant", "content": str(cell + 1)}]
            play_round(board, cell, rng, skill=self.options.opponent_skill)
        return Conversation(messages=messages)

    def score_messages(self, messages: list[dict[str, Any]]) -> float:
        """Score a game from 0 to 1 by its last board and move: win 0.9, draw 0.6, loss 0.35, illegal move 0.1."""
        shown, answer = messages[-2:]
        board = read_board(shown["content"])
        cell = parse_move(answer["content"], board)
        if cell is None:
            return 0.1
        board.place(cell, POLICY)
        # If the policy's last move did not end the game, the opponent's answer won it.
        return {"win": 0.9, "draw": 0.6}.get(board.outcome() or "loss", 0.35)

    def render_trajectory(self, trajectory: Trajectory) -> str:
        lines = []
        for message in trajectory.messages()[1:]:
            content = str(message.get("content") or "")
            lines.append(f"-> {content}\n" if message["role"] == "assistant" else content)
        outcome = next((name for name in REWARDS if trajectory.metrics.get(name)), "unfinished")
        return "\n".join([*lines, outcome.replace("_", " ")])


def parse_move(answer: str | None, board: Board) -> int | None:
    """The cell that an answer names; `None` unless the answer is just the number of a free cell.

    Example: on an empty board "5" is cell 4, and "10", "cell 5", "" and None give `None`.
    """
    text = (answer or "").strip()
    if len(text) != 1 or text not in "123456789":
        return None
    cell = int(text) - 1
    return cell if cell in board.free_cells() else None


def read_board(text: str) -> Board:
    """Read the text of a board."""
    board = Board()
    board.cells = [FREE if cell.isdigit() else cell for cell in text.replace("\n", "")]
    return board


def play_round(board: Board, cell: int, opponent: random.Random, *, skill: float = 0.0) -> str | None:
    """Make the policy's move in `cell`, then one of the opponent if the game goes on. Return the outcome.

    Args:
        skill: probability that the opponent's move is good; otherwise it is random.
    """
    board.place(cell, POLICY)
    if board.outcome() is None:
        good = _good_cell(board, OPPONENT) if skill and opponent.random() < skill else None
        board.place(opponent.choice(board.free_cells()) if good is None else good, OPPONENT)
    return board.outcome()


def _good_cell(board: Board, player: str) -> int | None:
    """A cell that completes a line of the player, else one that blocks a line of the other, else `None`."""
    for mark in (player, OPPONENT if player == POLICY else POLICY):
        for line in _LINES:
            marks = [board.cells[i] for i in line]
            if marks.count(mark) == 2 and FREE in marks:
                return line[marks.index(FREE)]
    return None


def _best_cell(text: str) -> int:
    """The best move of the policy on a board that is not over, as a perfect opponent and then a random one decide."""
    board = read_board(text)
    return max(board.free_cells(), key=lambda cell: _value("".join(board.cells), cell, POLICY))


@cache
def _value(cells: str, cell: int, player: str) -> tuple[float, float]:
    """What a move is worth to the policy against perfect play, and against random moves: 0 for a loss, 1 for a win."""
    board = Board()
    board.cells = [*cells]
    board.place(cell, player)
    outcome = board.outcome()
    if outcome is not None:
        return REWARDS[outcome], REWARDS[outcome]
    other = OPPONENT if player == POLICY else POLICY
    values = [_value("".join(board.cells), free, other) for free in board.free_cells()]
    if other == POLICY:
        return max(values)
    return min(perfect for perfect, _ in values), sum(random_ for _, random_ in values) / len(values)
