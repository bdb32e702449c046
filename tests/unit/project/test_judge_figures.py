"""The benchmark `judged`: a judge of a given reliability, what is kept of a training, and what all say together."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest

from art.rewards import JudgeSettings, Ruler, params_at
from art.task import get_task
from art.testing.judge import ScriptedJudge, grade_messages
from art.trajectory import Trajectory, TrajectoryGroup
from benchmarks import judged as benchmark
from benchmarks.judge_passes import draw_groups
from benchmarks.judge_passes import measure as measure_passes
from benchmarks.judging.pictures import draw_all, mean_curve
from benchmarks.judging.plan import HAND, PARTS, SEEDS, plan
from benchmarks.judging.reliability import find_noise, measure, set_noise, simulate
from benchmarks.judging.results import RESULTS, Arm, JudgedTask, Measured, Point, Settings, Training, read_all
from benchmarks.judging.summary import costs_of, level_of
from benchmarks.judging.tables import NOISE_ARMS, block, noise_row
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
        settings = JudgeSettings(cache_path=None)
        ruler = Ruler("openai/judge", extra_litellm_params=params_at(judge.base_url), settings=settings)
        measured = await measure(ruler, groups)
    assert measured is not None
    assert measured.reliability == pytest.approx(0.6, abs=0.15)
    assert measured.pairwise_accuracy > 0.75
    assert measured.order_bias == pytest.approx(2 * noise, abs=0.15)


def test_more_noise_is_less_reliable() -> None:
    judge = ScriptedJudge(lambda trajectory: 0.5)
    scores = [[0.2, 0.4, 0.6, 0.8]]
    found = [simulate(judge, scores, noise) for noise in (0.0, 0.05, 0.2, 1.0)]
    assert found[0] == 1.0
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.4
    with pytest.raises(ValueError, match=r"even with noise 2.0 the judge is more reliable than 0.01"):
        find_noise(judge, scores, 0.01)


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


def test_an_arm_that_did_not_reach_the_level_on_every_seed_has_no_mean_number_of_steps() -> None:
    results = judged(
        training(HAND, 1, 0.2, 0.6, 1.0), training(HAND, 2, 0.2, 0.6, 1.0),
        training(JUDGE, 1, 0.2, 0.4, 0.9), training(JUDGE, 2, 0.2, 0.3, 0.4),
    )  # fmt: skip
    [cost] = costs_of(results, [JUDGE])
    assert (cost.steps, cost.more_steps, cost.reached) == (None, None, 1)
    assert noise_row(cost)["steps to half the gain by hand"] == " (1 of 2 seeds reached it)"


def test_a_training_that_ended_early_stays_where_it_ended() -> None:
    early = training(HAND, 1, 0.2, 0.6)
    assert mean_curve(judged(early, training(HAND, 2, 0.2, 0.4, 0.8)), HAND) == (
        [0, 2, 4],
        pytest.approx([0.2, 0.5, 0.7]),
    )


def test_trainings_are_kept_and_not_made_again(tmp_path: Path) -> None:
    results = JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS)
    results.put(training(HAND, 1, 0.2, 0.6), tmp_path)
    again = JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS)
    assert again.find(HAND, 1) is not None
    assert again.find(HAND, 2) is None
    assert again.find(JUDGE, 1) is None
    with pytest.raises(ValueError, match="choose another folder by --judged-out"):
        JudgedTask.open(tmp_path, "yes_no_maybe", "maybe", SETTINGS.model_copy(update={"steps": 5}))


def test_the_plan_finishes_the_first_seeds_first() -> None:
    parser = argparse.ArgumentParser()
    benchmark.add_options(parser.add_argument_group("judged"))
    parser.add_argument("--quick", action="store_true")
    planned = plan(parser.parse_args([]))
    first = [("mail_search", 101), ("tic_tac_toe", 101), ("yes_no_maybe", 101)]
    assert [(one.task, one.seed) for one in planned[:3]] == first
    arms = planned[2].arms
    assert len(arms) == len(set(arms)) == len({*PARTS["compare"], *NOISE_ARMS})
    assert len(planned) == sum(len(seeds) for seeds in SEEDS.values())
    [quick] = plan(parser.parse_args(["--quick", "--judged-parts", "passes"]))
    assert (quick.seed, quick.settings.steps, quick.settings.split) == (0, 2, "val")


def test_pictures_and_tables_show_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arms = {*PARTS["compare"], *NOISE_ARMS}
    trainings = [training(arm, seed, 0.2, 0.5, 0.9) for arm in arms for seed in (1, 2)]
    results = {"yes_no_maybe": judged(*trainings)}
    files = draw_all(results, tmp_path)
    assert [file.name for file in files] == ["judged-curves.png", "judged-noise-yes_no_maybe.png"]
    assert all(file.stat().st_size < 60_000 for file in files)
    page = tmp_path / "README.md"
    assert "| yes_no_maybe | both, 0.7 | 2 | 0.20" in block(results, page, "compare", tmp_path)
    text = block(results, page, "noise", tmp_path)
    assert "](judged-noise-yes_no_maybe.png)" in text
    assert "| judge, 0.5, 2 passes | 0.68" in text
    assert block({}, page, "compare", tmp_path) == "Nothing was measured yet.\n"


def test_tables_of_judges_in_pages_are_current() -> None:
    results = read_all()
    for page in pages():
        text = page.read_text()
        new = renewed(text, page, "judged", lambda page, name: block(results, page, name))
        assert new == text, f"{page}: renew it with: python -m benchmarks judged --judged-table"
    assert RESULTS.is_relative_to(ROOT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_comparison_runs(tmp_path: Path) -> None:
    words = ["--judged-tasks", "yes_no_maybe", "--judged-parts", "compare", "passes", "--judged-out", str(tmp_path)]
    parser = argparse.ArgumentParser()
    benchmark.add_options(parser.add_argument_group("judged"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(["--quick", *words])
    rows = benchmark.run(args).rows
    assert [row["rewards"] for row in rows] == ["by hand", "judge, 0.7", "judge, 0.7, 2 passes", "judge, 0.5, 2 passes"]
    stored = json.loads((tmp_path / "yes_no_maybe.json").read_text())
    assert all(0 < one["before"]["reliability"] <= 1 for one in stored["trainings"][1:])
    assert [point["step"] for point in stored["trainings"][0]["curve"]] == [0, 1, 2]
    assert benchmark.run(args).rows == rows
    assert json.loads((tmp_path / "yes_no_maybe.json").read_text()) == stored


@pytest.mark.parametrize(("kind", "noise"), [("one of three words", 0.12), ("won or lost", 0.36), ("degrees", 0.09)])
def test_two_passes_are_closer_to_the_truth_than_one_and_than_shrunk_ones(kind: str, noise: float) -> None:
    """The noise gives one pass a reliability of about 0.5."""
    sums = measure_passes(draw_groups(kind, 4, 300), noise)
    assert sums["report"].signal > sums["one pass"].signal + 0.05
    assert sums["report"].signal > sums["shrink"].signal
    assert sums["report"].size > sums["shrink"].size + 0.1
    assert JudgeSettings(passes=2).on_disagreement == "report"
    exact = measure_passes(draw_groups(kind, 4, 20), 0.0)
    assert all(one.signal == pytest.approx(1) and one.size == pytest.approx(1) for one in exact.values())
