"""The tasks `tic_tac_toe` and `yes_no_maybe`: reasons, scripted players and the opponent's skill."""

from __future__ import annotations

import random
from typing import Any

import pytest

from art.task import Task
from art.tasks.tic_tac_toe import Board, TicTacToe, play_round, read_board
from art.tasks.yes_no_maybe import YesNoMaybe
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory


async def answered(task: Task, answer: str) -> Trajectory:
    task.player = lambda scenario, *, rollout_index=0: lambda messages, tools: {"content": answer}  # type: ignore[method-assign]
    return await ScriptedModel(task).play(task.scenarios("val", seed=0, count=1)[0])


async def test_the_perfect_player_never_loses_and_mostly_wins() -> None:
    task = TicTacToe()
    games = [await ScriptedModel(task).play(scenario) for scenario in task.scenarios("val", seed=0, count=60)]
    assert not any(game.metrics["loss"] or game.metrics["invalid_move"] for game in games)
    assert sum(game.metrics["win"] for game in games) >= 57
    assert {game.metadata["why"] for game in games} <= {"win", "draw"}


async def test_against_a_good_opponent_the_perfect_player_still_never_loses() -> None:
    task = TicTacToe(opponent_skill=1.0)
    games = [await ScriptedModel(task).play(scenario) for scenario in task.scenarios("val", seed=0, count=25)]
    assert not any(game.metrics["loss"] for game in games)
    assert any(game.metrics["draw"] for game in games)
    assert task.label == "tic_tac_toe-opponent_skill-1.0"


def test_a_skilled_opponent_completes_its_line_before_it_blocks() -> None:
    board = read_board("O2O\nX56\nX89")
    assert play_round(board, 4, random.Random(0), skill=1.0) == "loss"
    board = read_board("XO3\n456\n789")
    assert play_round(board, 4, random.Random(0), skill=1.0) is None
    assert board.cells[8] == "O", "it blocks the diagonal"
    plain: Any = Board()
    assert play_round(plain, 0, random.Random(0)) is None


@pytest.mark.parametrize(("answer", "why"), [("5.", "'5.' is not the number"), ("", "is not the number")])
async def test_an_illegal_move_says_why(answer: str, why: str) -> None:
    game = await answered(TicTacToe(), answer)
    assert (game.reward, game.metadata["outcome"]) == (-0.5, "policy_fault")
    assert why in str(game.metadata["why"])


@pytest.mark.parametrize(
    ("answer", "reward", "outcome"), [("maybe", 1.0, "ok"), ("No.", 0.75, "ok"), ("perhaps", 0.0, "policy_fault")]
)
async def test_answers_say_what_they_pay(answer: str, reward: float, outcome: str) -> None:
    got = await answered(YesNoMaybe(), answer)
    assert (got.reward, got.metadata["outcome"]) == (reward, outcome)
    assert got.metadata["why"]


async def test_the_player_says_maybe() -> None:
    task = YesNoMaybe()
    assert (await ScriptedModel(task).play(task.scenarios("test", seed=0, count=1)[0])).reward == 1.0


@pytest.mark.parametrize("task", [TicTacToe(), YesNoMaybe()], ids=["tic_tac_toe", "yes_no_maybe"])
def test_scenarios_of_splits_differ(task: Task) -> None:
    drawn = {
        split: {
            s.inputs.get("prompt", s.seed)
            for s in task.scenarios(split, seed=0, count=count)  # type: ignore[arg-type]
        }
        for split, count in (("train", 2000), ("val", 400), ("test", 400))
    }
    assert not drawn["train"] & (drawn["val"] | drawn["test"])
    assert not drawn["val"] & drawn["test"]
