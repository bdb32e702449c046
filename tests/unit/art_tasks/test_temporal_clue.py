"""The task `temporal_clue`: splits, the reward and its parts, scripted play and player, scores for a judge."""

from __future__ import annotations

import random
from typing import Any

import pytest

from art.errors import ConfigError
from art.task import get_task
from art.testing.scripted_model import ScriptedModel
from art_tasks.temporal_clue import TemporalClue, grade, parse_answers

OPTIONS = {"A": ["attic", "study"], "B": ["Ada", "Hugo", "Iris"], "C": ["five", "six"]}
ANSWERS = {"A": "attic", "B": "Hugo", "C": "six"}
TINY: Any = get_task("temporal_clue", is_tiny=True)


def cases(task: Any, split: Any, count: int) -> set[str]:
    """What puzzles are about, whatever their clues: the words, the questions and the answers."""
    scenarios = task.scenarios(split, seed=5, count=count)
    return {
        scenario.inputs["prompt"].partition("Clues:")[0] + str(scenario.inputs["answers"]) for scenario in scenarios
    }


@pytest.mark.parametrize("scale", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_no_case_is_in_two_splits(scale: int) -> None:
    """The words, questions and answers of a case decide its split, so other clues do not bring it into another one."""
    train, val, test = (
        cases(TINY, split, count * scale) for split, count in (("train", 200), ("val", 40), ("test", 40))
    )
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(train) > 190 * scale


def test_scenarios_are_the_same_for_the_same_arguments() -> None:
    assert TINY.scenarios("val", seed=1, count=3) == TINY.scenarios("val", seed=1, count=3)
    assert TINY.scenarios("val", seed=1, count=3) != TINY.scenarios("val", seed=2, count=3)
    assert all(scenario.id.startswith(f"{TINY.label}/val/1/") for scenario in TINY.scenarios("val", seed=1, count=3))


@pytest.mark.parametrize(
    ("text", "reward", "why"),
    [
        ("A. attic\nB. Hugo\nC. six", 1.0, "all answers are right"),
        ("Let me think. A. study?\nA. study\nB. Ada\n\nA. attic\n**B. Hugo**\n- C. **six**.", 1.0, "all answers are right"),
        ("a. attic\nA: the Attic\nB) HUGO\nC. six.", 1.0, "all answers are right"),
        ("A. attic\nB. Iris\nC. six", 0.8 * 2 / 3, "B is Hugo, not Iris"),
        ("A. study\nB. Iris\nC. five", 0.0, "A is attic, not study; B is Hugo, not Iris; C is six, not five"),
        ("A. attic\nB. Hugo", -0.2, "no readable answer to C"),
        ("A. attic\nB. Hugo\nC. seven", -0.2, "no readable answer to C"),
        ("A. attic\nB. Hugo or Ada\nC. six", -0.2, "no readable answer to B"),
        ("A. attic\nB. Hugo\nC. six\nC. I am not sure", -0.2, "no readable answer to C"),
        ("attic Hugo six", -0.2, "no readable answer to A, B, C"),
        ("", -0.2, "no readable answer to A, B, C"),
        (None, -0.2, "no readable answer to A, B, C"),
    ],
)  # fmt: skip
def test_what_answers_earn(text: str | None, reward: float, why: str) -> None:
    graded = grade(text, ANSWERS, OPTIONS)
    assert graded.reward == pytest.approx(reward)
    assert sum(graded.parts.values()) == graded.reward
    assert graded.why == why
    assert graded.is_solved == (reward == 1.0)
    assert graded.is_readable == (reward != -0.2)


def test_a_letter_that_is_not_asked_for_does_not_matter() -> None:
    assert parse_answers("A. attic\nB. Ada\nC. five\nD. lamp\nI. think", OPTIONS) == {
        "A": "attic", "B": "Ada", "C": "five"
    }  # fmt: skip


@pytest.mark.parametrize("task", [TemporalClue(), TINY], ids=["full", "tiny"])
async def test_the_scripted_player_solves_every_case(task: Any) -> None:
    model = ScriptedModel(task)
    for scenario in task.scenarios("test", seed=0, count=2):
        trajectory = await model.play(scenario)
        assert trajectory.reward == pytest.approx(1.0)
        facts = {f"right/{fact}": 1.0 for fact in scenario.inputs["facts"].values()}
        parts = {"reward/answers": 0.8, "reward/all_right": 0.2, "reward/format": 0.0}
        wanted = {"solved": 1.0, "accuracy": 1.0, "malformed_answer": 0.0} | facts | parts
        assert trajectory.metrics | wanted == pytest.approx(trajectory.metrics)
        assert trajectory.metadata["outcome"] == "ok"
        assert trajectory.metadata["scenario_id"] == scenario.id
        assert "all answers are right; reward 1" in task.render_trajectory(trajectory)
    await model.close()


class Silent(TemporalClue):
    """The task with a player that says nothing of use."""

    def player(self, scenario: Any, *, rollout_index: int = 0) -> Any:
        return lambda messages, tools: {"role": "assistant", "content": "It was the butler."}


async def test_an_answer_that_cannot_be_read_is_the_fault_of_the_policy() -> None:
    task = Silent()
    (scenario,) = task.scenarios("val", seed=0, count=1)
    trajectory = await ScriptedModel(task).play(scenario)
    assert trajectory.reward == -0.2 == trajectory.metrics["reward/format"]
    assert trajectory.metadata["outcome"] == "policy_fault"
    assert trajectory.metrics["malformed_answer"] == 1.0


def test_play_is_legal_and_as_good_as_its_skill() -> None:
    rng = random.Random(0)
    right = [TINY.play(rng, 1.0).messages for _ in range(20)]
    for _, user, answer in [*right, *(TINY.play(rng, 0.0).messages for _ in range(20))]:
        lists = dict(line.split(": ") for line in user["content"].partition("Clues:")[0].splitlines())
        options = {"A": lists["Rooms"].split(", "), "B": lists["Suspects"].split(", ")}
        assert None not in parse_answers(answer["content"], options).values(), "an answer cannot be read"
    for _, user, answer in right:
        room, suspect = (line[3:] for line in answer["content"].splitlines())
        clues = user["content"].splitlines()
        assert f"- Marlow {room}" in clues or f"- {suspect} {room}" in clues


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weapons": 3}, "`weapons` must be 0 or at least `suspects` \\(4\\), got 3"),
        ({"suspects": 2, "hours": 1, "weapons": 0, "motives": 0, "questions": 8}, "`questions` must be at most 5"),
        ({"rooms": 1}, "rooms"),
        ({"difficulty": "hard"}, "has no option 'difficulty'"),
        ({"clues": 3}, "has no option 'clues'"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TemporalClue(**options)
