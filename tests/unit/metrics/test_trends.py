"""Trends are those of the last steps, and are there from the step on that the catalogue names."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from art.metrics import catalogue
from art.metrics.findings import find_findings, measure_trends

STEP: dict[str, float] = {
    "offpolicy/ratio_mean": 1.0,
    "data/step_num_rollouts_trained": 128.0,
    "data/step_num_groups_submitted": 16.0,
    "data/step_num_groups_trainable": 14.0,
    "data/step_num_trajectories": 128.0,
    "data/reward_hist/9": 30.0,
}


def steps(**columns: list[float]) -> list[dict[str, float]]:
    """One step for each value; `reward_mean` and others by the name of their metric without its group."""
    count = len(next(iter(columns.values())))
    rows = [STEP | {"data/reward_mean": 0.2} for _ in range(count)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[f"data/{name}"] = value
    return rows


def trends(**columns: list[float]) -> dict[str, float]:
    *earlier, last = steps(**columns)
    return measure_trends(last, earlier)


def found(**columns: list[float]) -> set[str]:
    """Names of the findings of the last of some steps."""
    *earlier, last = steps(**columns)
    metrics = last | measure_trends(last, earlier)
    return {finding.name for finding in find_findings(metrics, earlier[-1] if earlier else {})}


def noisy(start: float, rise: float, *, seed: int, count: int = 20) -> list[float]:
    generator = random.Random(seed)
    return [start + rise * i / (count - 1) + generator.gauss(0, 0.03) for i in range(count)]


def test_the_rise_of_the_reward_is_that_of_a_fitted_line() -> None:
    values = [0.1, 0.3, 0.2, 0.5, 0.4, 0.6, 0.5, 0.8, 0.7, 0.9] * 2
    fit: Any = statistics.linear_regression(range(20), values)
    residuals = [value - fit.intercept - fit.slope * i for i, value in enumerate(values)]
    error = math.sqrt(sum(r**2 for r in residuals) / 18 / 665)  # 665 = sum of (i - 9.5)^2
    seen = trends(reward_mean=[9.0, 9.0, *values])  # what came before the window counts for the run alone
    assert seen["trend/reward_rise"] == pytest.approx(19 * fit.slope)
    assert seen["trend/reward_rise_error"] == pytest.approx(19 * error)
    assert seen["trend/run_rise"] < 0 < trends(reward_mean=values)["trend/run_rise"]
    assert seen["trend/groups_trainable_share"] == 14 / 16
    assert seen["trend/top_reward_share"] == 30 / 128


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_reward_is_found_and_a_rising_one_is_not(seed: int) -> None:
    assert found(reward_mean=noisy(0.2, 0.0, seed=seed)) == {"reward_flat"}
    assert found(reward_mean=noisy(0.2, 0.4, seed=seed)) == set()
    assert found(reward_mean=noisy(0.2, 0.0, seed=seed)[:19]) == set()  # too early to say


def test_a_reward_that_has_risen_since_the_first_steps_is_not_flat() -> None:
    """Rewards of a run from 0.53 to 0.91 that was called flat in 19 of 30 steps."""
    rising = [0.53, 0.58, 0.62, 0.55, 0.48, 0.40, 0.5, 0.58, 0.63, 0.68, 0.70, 0.61, 0.42, 0.55, 0.66]
    level = noisy(0.85, 0.0, seed=3)
    assert [step for step in range(20, 36) if found(reward_mean=[*rising, *level][:step])] == []
    assert found(reward_mean=level) == {"reward_flat"}


def test_a_reward_may_stay_once_the_learning_rate_has_fallen() -> None:
    def after(share: float) -> set[str]:
        rows = [row | {"loss/learning_rate": 1e-3} for row in steps(reward_mean=noisy(0.2, 0.0, seed=1, count=20))]
        last = rows[-1] | {"loss/learning_rate": share * 1e-3}
        return {each.name for each in find_findings(last | measure_trends(last, rows[:-1]), rows[-2])}

    assert after(0.26) == {"reward_flat"}
    assert after(0.24) == set()


@pytest.mark.parametrize(
    "column",
    [
        {"reward_hist/9": [100.0] * 20},  # near its top
        {"step_num_groups_trainable": [7.0] * 20},  # few groups differ at all, which another finding is about
    ],
)
def test_a_flat_reward_is_no_finding_where_it_could_hardly_rise(column: dict[str, list[float]]) -> None:
    assert found(reward_mean=noisy(0.2, 0.0, seed=1), **column) == set()


def test_steps_without_rewards_have_no_trends() -> None:
    *earlier, last = steps(reward_mean=[0.1] * 20)
    assert measure_trends({"loss/train": 1.0}, earlier) == {}
    assert measure_trends(last, [{"loss/train": 1.0}, *earlier[1:]]) == {}
    assert measure_trends(last, []) == {}


def test_every_trend_is_in_the_catalogue() -> None:
    assert set(trends(reward_mean=[0.1] * 20)) == set(catalogue.TREND_METRICS)
