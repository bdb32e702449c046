"""The task `codenames`: its rollouts and rewards, who is trained, boards by split, play, and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from art.errors import ConfigError
from art.task import Scenario, draw_scenarios, get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory, is_policy_fault
from art_tasks.codenames.codenames_task import Codenames
from art_tasks.codenames.game import WordBoard
from art_tasks.codenames.match import FAULT_REWARD, read_board, read_key, role_of
from tests.support.codenames_models import Say, TalkingModel

TINY = Codenames(**Codenames.tiny_options)
CARDS = {
    "words": ["horse", "hand", "cow", "hammer", "wave"], "kinds": ["ours", "theirs", "ours", "assassin", "neutral"],
    "begins": "us",
}  # fmt: skip
SCENARIO = Scenario(id="codenames/test", seed=3, inputs=CARDS)


def says(clue: str, *words: str) -> Say:
    """Give this clue, and name these words one after the other."""

    def say(role: str, messages: list[Any]) -> str:
        return clue if role == "spymaster" else words[sum(message["role"] == "assistant" for message in messages)]

    return say


async def roll(say: Say, task: Codenames = TINY, index: int = 0, **model: Any) -> tuple[Trajectory, TalkingModel]:
    talking = TalkingModel(say, **model)
    return await task.rollout(talking, SCENARIO, rollout_index=index, step=4), talking  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("say", "reward", "metrics", "why"),
    [
        (says("farm 2", "cow", "horse"), 1.0, {"win": 1, "own_found": 1}, "the team won; the guesser named 2 of"),
        (says("farm 1", "cow", "horse"), 1.0, {"win": 1}, "the team won"),
        (says("farm 1", "cow", "pass"), 0.25, {"win": 0, "own_found": 0.5, "turn_limit": 1}, "the turns are used up"),
        (says("farm 1", "wave"), 0.0, {"own_found": 0, "turn_limit": 1}, "named 0 of the team's 2 words in 1 turn"),
        (says("farm 2", "cow", "hand"), 0.25, {"own_found": 0.5, "turn_limit": 0}, "the other team won"),
        (says("farm 2", "cow", "hammer"), -0.25, {"assassin": 1}, "the guesser named the assassin"),
        (says("farm 2", "hammer"), -0.5, {"assassin": 1, "own_found": 0}, "the team lost"),
        (says("farmer 2"), -1.0, {"invalid_clue": 1}, "the spymaster broke the rules, as the clue 'farmer' is not one"),
        (says("cow 2"), -1.0, {"invalid_clue": 1}, "'cow' is not one of the allowed clues"),
        (says("farm 2", "pass"), -1.0, {"invalid_guess": 1}, "the answer 'pass' is not a word of the board"),
        (says("farm 2", "cow", "cow"), -1.0, {"invalid_guess": 1, "own_found": 0.5}, "the guesser broke the rules"),
        (says("farm 2", ""), -1.0, {"invalid_guess": 1}, "the answer '' is not a word of the board"),
        (says("", ""), -1.0, {"invalid_clue": 1}, "is not one word and a number"),
    ],
)
async def test_what_games_earn_and_why(say: Say, reward: float, metrics: dict[str, float], why: str) -> None:
    trajectory, model = await roll(say)
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.metrics | metrics == trajectory.metrics
    assert why in trajectory.metadata["why"]  # type: ignore[operator]
    parts = [value for name, value in trajectory.metrics.items() if name.startswith("reward/")]
    assert sum(parts) == pytest.approx(reward)
    fault = trajectory.metrics["invalid_clue"] + trajectory.metrics["invalid_guess"]
    assert is_policy_fault(trajectory) == (reward == FAULT_REWARD) == (fault == 1)
    assert (trajectory.metadata.get("outcome") == "policy_fault") == (reward == FAULT_REWARD)
    assert {request["model"] for request in model.requests} == {"p/m@4"}


async def test_a_rollout_has_a_history_for_each_role_and_both_are_told_the_end() -> None:
    trajectory, model = await roll(says("farm 2", "cow", "horse"))
    (guesser,) = trajectory.additional_histories
    assert model.roles() == ["spymaster", "guesser", "guesser"]
    assert [role_of(history.messages()[0]["content"]) for history in (trajectory, guesser)] == ["spymaster", "guesser"]  # type: ignore[typeddict-item]
    said = [[m["content"] for m in h.messages() if m["role"] == "assistant"] for h in (trajectory, guesser)]  # type: ignore[typeddict-item]
    assert said == [["farm 2"], ["cow", "horse"]]
    for history in (trajectory, guesser):
        assert history.messages()[-1] == {"role": "user", "content": trajectory.metadata["why"]}
    assert "theirs" not in guesser.messages()[1]["content"]  # type: ignore[typeddict-item]
    assert len({request["seed"] for request in model.requests}) == 3
    other = (await roll(says("farm 2", "cow", "horse"), index=1))[1]
    assert not {request["seed"] for request in model.requests} & {request["seed"] for request in other.requests}
    shown = TINY.render_trajectory(trajectory)
    assert all(
        text in shown for text in ("-- spymaster", "-- guesser", "-> farm 2", "-> cow", "the team won", "reward: 1")
    )


async def test_a_guesser_who_was_not_asked_has_no_history() -> None:
    trajectory, _ = await roll(says("wrong"))
    assert trajectory.additional_histories == []


async def test_an_answer_that_was_cut_off_is_a_fault() -> None:
    trajectory, _ = await roll(says("farm 2", "cow", "horse"), finish_reason="length")
    assert trajectory.reward == FAULT_REWARD
    assert "the answer was cut off after 12 tokens" in trajectory.metadata["why"]  # type: ignore[operator]


async def test_a_failure_of_the_server_is_raised_and_a_full_context_is_a_fault() -> None:
    def fails(code: str | None) -> Say:
        def say(role: str, messages: list[Any]) -> str:
            if role == "guesser" and len(messages) > 2:
                error = RuntimeError("no")
                error.code = code  # type: ignore[attr-defined]
                raise error
            return "farm 2" if role == "spymaster" else "cow"

        return say

    with pytest.raises(RuntimeError):
        await roll(fails(None))
    trajectory, _ = await roll(fails("context_length_exceeded"))
    assert "the guesser broke the rules, as the conversation fills the context" in trajectory.metadata["why"]  # type: ignore[operator]


async def test_the_scripted_player_wins_by_what_it_is_told() -> None:
    model = ScriptedModel(TINY)
    played = [await model.play(board) for board in draw_scenarios(TINY, "val", seed=1, count=10)]
    assert [trajectory.reward for trajectory in played] == [1.0] * 10
    await model.close()
    full = Codenames(opponent_skill=0.3)
    model = ScriptedModel(full)
    boards = draw_scenarios(full, "val", seed=1, count=4)
    games = [await model.play(board, index) for index, board in enumerate(boards)]
    await model.close()
    assert {WordBoard.from_inputs(board.inputs).begins for board in boards} == {"us", "them"}
    assert [trajectory.metrics["win"] for trajectory in games] == [1.0] * 4
    assert min(trajectory.metrics["num_turns"] for trajectory in games) >= 2
    again = json.dumps(games[0].messages(), default=str)
    assert "the other team: " in again


def contents(task: Codenames, split: Any, seed: int, count: int) -> set[str]:
    boards = [scenario.inputs for scenario in draw_scenarios(task, split, seed=seed, count=count)]
    return {str((board["begins"], sorted(zip(board["words"], board["kinds"], strict=True)))) for board in boards}


@pytest.mark.parametrize("task", [TINY, Codenames()], ids=["tiny", "full"])
def test_no_board_is_in_two_splits(task: Codenames) -> None:
    train = contents(task, "train", 0, 2000)
    val, test = (contents(task, split, 0, 200) for split in ("val", "test"))
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(train) > 1900
    assert draw_scenarios(task, "val", seed=5, count=3) == draw_scenarios(task, "val", seed=5, count=3)
    assert contents(task, "train", 1, 50) != contents(task, "train", 2, 50)
    ids = [scenario.id for scenario in draw_scenarios(task, "train", seed=0, count=5)]
    assert all(id.startswith(f"{task.label}/train/") for id in ids)


def test_boards_have_the_words_that_the_options_ask_for() -> None:
    for scenario in draw_scenarios(Codenames(), "train", seed=0, count=20):
        board = WordBoard.from_inputs(scenario.inputs)
        own, other = (9, 8) if board.begins == "us" else (8, 9)
        assert [board.count(kind) for kind in ("ours", "theirs", "neutral", "assassin")] == [own, other, 7, 1]  # type: ignore[arg-type]
        assert len(board.cards) == 25
    for scenario in draw_scenarios(TINY, "train", seed=0, count=50):
        board = WordBoard.from_inputs(scenario.inputs)
        themes = {name: {*words} for name, words in TINY.lexicon.themes.items()}
        own = {word for word, kind in board.cards.items() if kind == "ours"}
        (theme,) = [words for words in themes.values() if own <= words]
        assert {*board.cards} & theme == own


@pytest.mark.parametrize("options", [dict(Codenames.tiny_options), {}])
def test_play_is_legal_and_reads_what_it_was_shown(options: dict[str, Any]) -> None:
    task = Codenames(**options)
    rng = random.Random(0)
    good = {"spymaster": 0, "guesser": 0}
    for _ in range(40 if task.form.max_turns == 1 else 12):
        conversation = task.play(rng, 0.5)
        assert conversation.messages[-1]["role"] == "assistant"
        role = role_of(str(conversation.messages[0]["content"]))
        for asked, said in zip(conversation.messages[1::2], conversation.messages[2::2], strict=True):
            shown, text = str(asked["content"]), str(said["content"])
            if role == "spymaster":
                assert not isinstance(task._game(WordBoard(read_key(shown), "us")).read_clue(text), str)
            else:
                _, num_guesses, hidden = read_board(shown)
                assert text in hidden or (text == "pass" and num_guesses)
        good[role] += 1
    assert min(good.values()) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"board": "huge"}, "option `?board`?"),
        ({"train": "guesser"}, "has no option 'train'"),
        ({"opponent_skill": 2}, "opponent_skill"),
        ({"colour": "red"}, "has no option 'colour'"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_task("codenames", options)
