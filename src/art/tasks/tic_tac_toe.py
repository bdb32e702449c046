"""Tic-tac-toe against an opponent that plays at random, one message per move.

user       1O3        a free cell shows its number
           4X6
           78O
assistant  7
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

FREE = "."
FIRST, SECOND = "X", "O"
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_REWARDS = {"win": 1.0, "draw": 0.5, "loss": 0.0, "invalid_move": -0.5}


class Board:
    """Nine cells, numbered from 0 row by row, and whose turn it is."""

    def __init__(self) -> None:
        self.cells = [FREE] * 9
        self.to_move = FIRST

    def free_cells(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell == FREE]

    def play(self, cell: int) -> None:
        if self.cells[cell] != FREE or self.is_over():
            raise ValueError(f"cell {cell} cannot be played on {''.join(self.cells)}")
        self.cells[cell] = self.to_move
        self.to_move = SECOND if self.to_move == FIRST else FIRST

    def winner(self) -> str | None:
        for a, b, c in _LINES:
            if self.cells[a] != FREE and self.cells[a] == self.cells[b] == self.cells[c]:
                return self.cells[a]
        return None

    def is_over(self) -> bool:
        return self.winner() is not None or FREE not in self.cells

    def __str__(self) -> str:
        shown = [str(i + 1) if cell == FREE else cell for i, cell in enumerate(self.cells)]
        return "\n".join("".join(shown[row : row + 3]) for row in (0, 3, 6))


class TicTacToe(Task):
    name: ClassVar[str] = "tic_tac_toe"
    description: ClassVar[str] = "tic-tac-toe against an opponent that plays at random"
    headline_metric: ClassVar[str] = "win"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(learning_rate=5e-3, num_steps=60, schedule="linear")

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        found = []
        for index in range(count):
            mark = random.Random(derive_seed(self.name, split, seed, index, "mark")).choice((FIRST, SECOND))
            found.append(self.scenario(split, seed, index, {"mark": mark}))
        return found

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        mark = scenario.inputs["mark"]
        opponent = random.Random(derive_seed(scenario.seed, rollout_index, "opponent"))
        client, name = model.openai_client(), model.get_inference_name(step)
        trajectory = Trajectory(
            messages_and_choices=[_system(mark)], metadata={"scenario_id": scenario.id, "mark": mark}
        )
        board, num_moves, outcome = Board(), 0, None
        _let_opponent_move(board, mark, opponent.choice)
        while outcome is None:
            trajectory.messages_and_choices.append({"role": "user", "content": str(board)})
            completion = await client.chat.completions.create(
                model=name,
                messages=trajectory.messages(),
                temperature=1.0,
                max_completion_tokens=4,
                seed=derive_seed(scenario.seed, rollout_index, num_moves),
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            cell = parse_move(choice.message.content, board)
            if cell is None:
                outcome = "invalid_move"
                break
            num_moves += 1
            board.play(cell)
            _let_opponent_move(board, mark, opponent.choice)
            outcome = _outcome(board, mark)
        trajectory.reward = _REWARDS[outcome]
        trajectory.metrics |= {key: float(key == outcome) for key in _REWARDS} | {"num_moves": num_moves}
        return trajectory

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        return [_random_game(rng) for _ in range(count)]

    def render_trajectory(self, trajectory: Trajectory) -> str:
        lines = [f"the policy plays {trajectory.metadata.get('mark')}"]
        for message in trajectory.messages()[1:]:
            lines.append(f"-> {message['content']}\n" if message["role"] == "assistant" else str(message["content"]))
        outcome = next((name for name in _REWARDS if trajectory.metrics.get(name)), "unfinished")
        return "\n".join([*lines, outcome.replace("_", " ")])


def parse_move(answer: str | None, board: Board) -> int | None:
    """The cell that an answer names, `None` unless it is a bare number of a free cell."""
    text = (answer or "").strip()
    if len(text) != 1 or text not in "123456789" or int(text) - 1 not in board.free_cells():
        return None
    return int(text) - 1


def _system(mark: str) -> dict[str, Any]:
    return {"role": "system", "content": f"You play {mark}. Answer with the number of a free cell."}


def _let_opponent_move(board: Board, mark: str, choose: Callable[[list[int]], int]) -> None:
    if not board.is_over() and board.to_move != mark:
        board.play(choose(board.free_cells()))


def _outcome(board: Board, mark: str) -> str | None:
    if not board.is_over():
        return None
    winner = board.winner()
    return "draw" if winner is None else "win" if winner == mark else "loss"


def _random_game(rng: random.Random) -> Conversation:
    """A game between two random players, seen by one of them."""
    mark = rng.choice((FIRST, SECOND))
    messages: list[Any] = [_system(mark)]
    board = Board()
    _let_opponent_move(board, mark, rng.choice)
    while not board.is_over():
        cell = rng.choice(board.free_cells())
        messages += [{"role": "user", "content": str(board)}, {"role": "assistant", "content": str(cell + 1)}]
        board.play(cell)
        _let_opponent_move(board, mark, rng.choice)
    return Conversation(messages=messages)
