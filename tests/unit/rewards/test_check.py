"""The check of a judge measures the known errors of scripted judges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art.cli.main import main
from art.rewards import Ruler
from art.rewards.ruler import compare_passes
from art.storage.trajectories import append_groups
from art_recipes.judge_check import JudgeReport, check_judge, pairwise_accuracy, slope

pytest.importorskip("litellm")

TRUTHS = [(0.3, 0.5, 0.6, 0.4), (0.45, 0.35, 0.65, 0.55), (0.5, 0.4, 0.3, 0.6), (0.7, 0.31, 0.52, 0.43)] * 3


async def measure(start_judge, address, make_group, settings, **script: Any) -> JudgeReport:
    judge = start_judge(**script)
    groups = [make_group(*truth) for truth in TRUTHS]
    labels = {id(group): list(truth) for group, truth in zip(groups, TRUTHS, strict=True)}
    ruler = Ruler("openai/judge", extra_litellm_params=address(judge), settings=settings)
    return await check_judge(ruler, groups, label=lambda group: labels[id(group)], seed=1)


async def test_a_perfect_judge_has_no_noise_and_no_bias(start_judge, address, make_group, settings) -> None:
    report = await measure(start_judge, address, make_group, settings)
    assert (report.num_groups, report.num_trajectories, report.num_questions) == (12, 48, 24)
    assert (report.faults, report.num_refused) == ([], 0)
    assert report.order_bias == pytest.approx(0, abs=1e-9)
    assert [report.order_reliability, report.pairwise_accuracy] == [1, 1]
    assert report.spread == pytest.approx(0.12, abs=0.02)
    assert 0 < report.seconds_median <= report.seconds_max


async def test_order_bias_is_measured_and_removed_by_two_passes(start_judge, address, make_group, settings) -> None:
    report = await measure(start_judge, address, make_group, settings, position_bias=-0.15)
    low, high = report.order_bias_interval
    assert report.order_bias == pytest.approx(-0.3, abs=0.01)
    assert low <= report.order_bias <= high < -0.25
    assert report.order_reliability < 0.6
    assert report.pairwise_accuracy < 0.9 < report.two_pass_accuracy == 1


async def test_noise_is_no_bias_of_the_order(start_judge, address, make_group, settings) -> None:
    report = await measure(start_judge, address, make_group, settings, noise=0.1)
    low, high = report.order_bias_interval
    assert low < 0 < high
    assert report.order_reliability < report.two_pass_reliability


async def test_groups_without_scores_are_counted(start_judge, address, make_group, settings) -> None:
    report = await measure(start_judge, address, make_group, settings, faults=["401", "missing"])
    assert len(report.faults) == 1
    assert report.num_refused == 1
    assert report.num_questions == 22


def test_the_command(start_judge, make_group, tmp_path: Path, capsys) -> None:
    judge = start_judge(position_bias=0.1)
    groups = [make_group(*truth) for truth in TRUTHS[:4]]
    for group, truth in zip(groups, TRUTHS, strict=False):
        for trajectory, score in zip(group, truth, strict=True):
            trajectory.metrics["win"] = score
    path = tmp_path / "groups.jsonl"
    append_groups(path, groups)
    common = ["judge", "check", str(path), "--judge", "openai/judge", "--judge-url", judge.base_url]
    assert main([*common, "--label", "win", "--max-groups", "3", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["num_groups"] == 3
    assert written["order_bias"] == pytest.approx(0.2, abs=0.02)
    assert written["two_pass_accuracy"] == 1
    shown = capsys.readouterr().out
    assert "order bias" in shown
    assert "unknown price" in shown
    assert main(common) == 0, "all rewards are equal: no labels"
    assert "not known" in capsys.readouterr().out
    assert main(["judge", "check", str(tmp_path / "none.jsonl"), "--judge", "openai/o3"]) == 1
    assert "there is no file" in capsys.readouterr().err


# -- the formulas --


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=2, max_size=8))
def test_pairwise_accuracy_equals_counting_all_pairs(items: list[tuple[float, int]]) -> None:
    scores, labels = [score for score, _ in items], [label for _, label in items]
    right, pairs = pairwise_accuracy(scores, labels)
    assert pairwise_accuracy(labels, labels) == (pairs, pairs)
    turned, _ = pairwise_accuracy([-score for score in scores], labels)
    assert right + turned == pairs


def test_the_formulas_give_their_examples() -> None:
    assert pairwise_accuracy([0.2, 0.9, 0.9], [0, 1, 2]) == (2.5, 3)
    assert slope([(1, 2), (-1, -2), (2, 4)]) == pytest.approx((2, 0))
    assert all(map(math.isnan, slope([(0, 1)])))
    example = compare_passes([0, 1], [0.2, 0.8])
    assert example.disagreement == pytest.approx(0.2)
    assert (example.single_reliability, example.reliability) == pytest.approx((0.88, 0.94), abs=0.005)
    assert compare_passes([0, 1], [1, 0]).reliability == 0
    assert compare_passes([0.4, 0.4], [0.6, 0.6]).reliability == 1
