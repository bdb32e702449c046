"""The task `game_2048`: rollouts in each form, their record, rewards, scenarios and the play of the warm start."""

from __future__ import annotations

import random
from typing import Any

import pytest

from art.task import get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_tasks.game_2048 import INVALID_REWARD, Game2048, legal_moves, read_board

SMALL = {"size": 2, "goal": 16}


async def played(task: Game2048, *, index: int = 1, answers: Any = None) -> Trajectory:
    """A rollout by the task's player, or by one that gives `answers` in turn."""
    scenario = task.scenarios("test", seed=0, count=index + 1)[index]
    if answers is not None:
        said = iter(answers)
        task.player = lambda scenario, *, rollout_index=0: lambda messages, tools: next(said)  # type: ignore[method-assign]
    return await ScriptedModel(task).play(scenario)


@pytest.mark.parametrize("signs", ["numbers", "letters"])
async def test_the_player_wins_in_every_form(signs: str) -> None:
    task = Game2048(size=2, goal=16, signs=signs)
    game = await played(task)
    assert game.metrics["goal"] == 1, game.metadata["why"]
    assert game.reward > 0.95
    assert game.reward == pytest.approx(sum(v for name, v in game.metrics.items() if name.startswith("reward/")))
    assert game.metadata["outcome"] == "ok"
    turns = int(game.metrics["num_turns"])
    assert game.metrics["num_moves"] == turns, "the player wastes no turn"
    histories = [history.messages() for history in (*game.additional_histories, game)]
    assert len(histories) == turns
    assert all([m["role"] for m in h[:3]] == ["system", "user", "assistant"] for h in histories)
    assert len(histories[0][0]["content"]) < 600
    shown = [read_board(m["content"], task.options) for h in histories for m in h if m["role"] == "user"]
    assert all(map(legal_moves, shown[:-1])), "each board that is shown can be played"
    assert f"points: {game.metrics['points']}, highest tile: 16." in str(histories[-1][-1]["content"])


async def test_the_player_wins_most_games() -> None:
    task = get_task("game_2048", is_tiny=True)
    scenarios = task.scenarios("val", seed=0, count=10)
    games = [await ScriptedModel(task).play(scenario) for scenario in scenarios]
    assert sum(game.metrics["goal"] for game in games) >= 8


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"signs": "numbers"}, {"content": "left"}),
        ({"signs": "numbers"}, {"content": "<move>left</move> or <move>up</move>"}),
        ({"signs": "numbers"}, {"content": "<move>sideways</move>"}),
        ({"signs": "letters"}, {"content": "x"}),
        ({"signs": "letters"}, {"content": ""}),
        ({"signs": "letters"}, {"content": "Game over: reached 16; points: 999, highest tile: 16."}),
    ],
)  # fmt: skip
async def test_an_answer_that_is_no_move_ends_the_game_below_all_others(
    options: dict[str, Any], answer: dict[str, Any]
) -> None:
    game = await played(Game2048(**SMALL, **options), answers=[answer])
    assert game.reward == INVALID_REWARD < 0
    assert (game.metrics["invalid_move"], game.metadata["outcome"]) == (1, "policy_fault")
    assert sum(v for name, v in game.metrics.items() if name.startswith("reward/")) == INVALID_REWARD
    assert "is no move" in str(game.metadata["why"])


@pytest.mark.parametrize(
    ("signs", "answer"),
    [("numbers", "Two 4s could meet.\n<move> Left </move>"), ("letters", " L\n"), ("letters", "left")],
)
async def test_moves_that_are_understood(signs: str, answer: str) -> None:
    game = await played(Game2048(**SMALL, signs=signs), answers=[{"content": answer}] * 40)
    assert game.metrics["invalid_move"] == 0
    assert game.metrics["idle"] == 1, "only left ends with moves that change nothing"
    assert game.metrics["num_idle_moves"] >= 5
    assert "5 moves in a row changed nothing" in str(game.metadata["why"])


async def test_the_agent_reads_that_its_move_changed_nothing() -> None:
    game = await played(Game2048(**SMALL, signs="letters"), answers=[{"content": "l"}] * 40)
    histories = (*game.additional_histories, game)
    assert "Nothing moved left." in "\n".join(str(m["content"]) for h in histories for m in h.messages())


async def test_games_are_shown_with_their_moves_and_end() -> None:
    task = Game2048(**SMALL, signs="letters")
    shown = task.render_trajectory(await played(task)).split("\n\n")
    assert shown[1] in "lrud"
    assert "reached 16" in shown[-1]


def test_no_game_is_in_two_splits_and_arguments_decide_the_games() -> None:
    task = Game2048()
    drawn = {
        split: {scenario.inputs["game"] for scenario in task.scenarios(split, seed=seed, count=count)}
        for split, seed, count in (("train", 0, 2000), ("val", 0, 400), ("test", 0, 400))
    }
    assert [len(games) for games in drawn.values()] == [2000, 400, 400]
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["val"]
    assert not drawn["val"] & drawn["test"]
    assert task.scenarios("train", seed=1, count=3) == task.scenarios("train", seed=1, count=3)
    assert Game2048(goal=64).scenarios("test", seed=0, count=1)[0].id.startswith("game_2048-goal-64/")


@pytest.mark.parametrize("options", [{}, Game2048.tiny_options])
def test_play_is_legal_and_ends_with_a_move(options: dict[str, Any]) -> None:
    task, rng = Game2048(**options), random.Random(0)
    if not options:
        task = Game2048(goal=64)  # whole games of the full form take seconds
    for conversation in (task.play(rng, skill) for skill in (0.0, 0.5, 1.0)):
        messages: list[Any] = list(conversation.messages)
        assert messages[-1]["role"] == "assistant"
        for shown, said in zip(messages[1::2], messages[2::2], strict=True):
            text = said["content"]
            legal = legal_moves(read_board(shown["content"], task.options))
            assert any(text == move[0] or move in text for move in legal)
