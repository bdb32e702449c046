"""The benchmark `judged`: a judge of a given reliability, what is kept of a training, and what all say together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from art.rewards import Ruler, params_at
from art.task import get_task
from art.testing.judge import ScriptedJudge, grade_messages
from art.trajectory import Trajectory, TrajectoryGroup
from benchmarks.judge_passes import draw_groups
from benchmarks.judge_passes import measure as measure_passes
from benchmarks.judging.plan import HAND
from benchmarks.judging.reliability import find_noise, measure, set_noise
from benchmarks.judging.results import RESULTS, Arm, JudgedTask, Measured, Point, Settings, Training, read_all
from benchmarks.judging.summary import costs_of, level_of
from benchmarks.judging.tables import block
from benchmarks.learnt.blocks import ROOT, pages, renewed

SETTINGS = Settings(steps=4, every=2, evaluate=10, split="val", groups=2, rollouts=4)
JUDGE = Arm(source="judge", reliability=0.7)


def training(arm: Arm, seed: int, *means: float) -> Training:
    curve = [Point(step=2 * place, mean=mean, low=mean - 0.1, high=mean + 0.1) for place, mean in enumerate(means)]
    measured = Measured(
        reliability=0.68, two_pass_reliability=0.8, pairwise_accuracy=0.95, order_bias=0.1, spread=0.2, groups=9
    )
    return Training(
        arm=arm, seed=seed, noise=0.1, before=None if arm == HAND else measured, after=None, curve=curve,
        judge_requests=8, wall_s=3.0, environment={},
    )  # fmt: skip


def judged(*trainings: Training) -> JudgedTask:
    return JudgedTask(task="yes_no_maybe", metric="maybe", settings=SETTINGS, trainings=trainings)


def groups_of_answers(count: int) -> list[TrajectoryGroup]:
    """Groups of four answers to the same request, which differ."""
    task, rng, groups = get_task("yes_no_maybe"), random.Random(0), []
    for _ in range(count):
        words = ["yes", "no", "maybe", rng.choice(["yes", "no", "maybe", "perhaps"])]
        histories: list[Any] = [
            [{"role": "user", "content": "say one"}, {"role": "assistant", "content": word}] for word in words
        ]
        groups.append(
            TrajectoryGroup(
                [Trajectory(messages_and_choices=one, reward=task.score_messages(one)) for one in histories]
            )
        )
    return groups


async def test_the_judge_has_the_reliability_that_a_check_measures() -> None:
    task, groups = get_task("yes_no_maybe"), groups_of_answers(16)
    with ScriptedJudge(grade_messages(task.score_messages)) as judge:
        noise = find_noise(judge, [[t.reward for t in group] for group in groups], 0.6)
        set_noise(judge, noise)
        ruler = Ruler("openai/judge", extra_litellm_params=params_at(judge.base_url))
        measured = await measure(ruler, groups)
    assert measured is not None
    assert measured.reliability == pytest.approx(0.6, abs=0.15)
    assert measured.pairwise_accuracy > 0.75
    assert measured.order_bias == pytest.approx(2 * noise, abs=0.15)


def test_steps_to_a_level_lie_on_straight_lines_between_evaluations() -> None:
    one = training(HAND, 0, 0.2, 0.4, 0.8)
    assert one.steps_to(0.3) == pytest.approx(1.0)
    assert one.steps_to(0.5) == pytest.approx(2.5)
    assert one.steps_to(0.1) == 0.0
    assert one.steps_to(0.9) is None
    assert one.gain == pytest.approx(0.6)


def test_gains_and_steps_are_compared_seed_by_seed() -> None:
    results = judged(
        training(HAND, 1, 0.2, 0.6, 1.0), training(HAND, 2, 0.0, 0.4, 0.8),
        training(JUDGE, 1, 0.2, 0.4, 0.9), training(JUDGE, 2, 0.0, 0.2, 0.8),
    )  # fmt: skip
    assert level_of(results.trainings[0]) == pytest.approx(0.6)
    by_hand, by_judge = costs_of(results, [HAND, JUDGE])
    assert by_hand.against_hand is None
    assert by_judge.against_hand is not None
    assert by_judge.against_hand.mean == pytest.approx(-0.05)
    assert by_judge.steps is not None
    assert by_judge.steps.mean == pytest.approx((2.8 + 8 / 3) / 2)
    assert by_judge.more_steps is not None
    assert by_judge.more_steps.mean == pytest.approx((2.8 / 2 + 8 / 3 / 2) / 2)


def test_trainings_are_kept_and_not_made_again(tmp_path: Path) -> None:
    results = JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS)
    results.put(training(HAND, 1, 0.2, 0.6), tmp_path)
    again = JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS)
    assert again.find(HAND, 1) is not None
    assert again.find(HAND, 2) is None
    assert again.find(JUDGE, 1) is None
    with pytest.raises(ValueError, match="choose another folder by --judged-out"):
        JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS.model_copy(update={"steps": 5}))


def test_tables_of_judges_in_pages_are_current() -> None:
    results = read_all()
    for page in pages():
        text = page.read_text()
        new = renewed(text, page, "judged", lambda page, name: block(results, page, name))
        assert new == text, f"{page}: renew it with: python -m benchmarks judged --judged-table"
    assert RESULTS.is_relative_to(ROOT)


@pytest.mark.parametrize(("kind", "noise"), [("one of three words", 0.12), ("won or lost", 0.36), ("degrees", 0.09)])
def test_two_passes_are_closer_to_the_truth_than_one_and_than_shrunk_ones(kind: str, noise: float) -> None:
    """The noise gives one pass a reliability of about 0.5."""
    sums = measure_passes(draw_groups(kind, 4, 300), noise)
    assert sums["report"].signal > sums["one pass"].signal + 0.05
    assert sums["report"].signal > sums["shrink"].signal
    assert sums["report"].size > sums["shrink"].size + 0.1
    exact = measure_passes(draw_groups(kind, 4, 20), 0.0)
    assert all(one.signal == pytest.approx(1) and one.size == pytest.approx(1) for one in exact.values())
