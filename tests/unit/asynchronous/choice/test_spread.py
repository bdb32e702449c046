"""The chance that a group has spread, against the truth for known pass rates, and its estimate from groups."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.asynchronous.choice.spread import SpreadEstimate, has_spread, spread_chance
from art.config import TrainConfig
from art.credit.advantages import RolloutRewards, compute_advantages


def exact(p: float, n: int) -> float:
    return 1 - p**n - (1 - p) ** n


def estimate(p: float, num_groups: int, rng: random.Random, n: int = 8) -> SpreadEstimate:
    one = SpreadEstimate()
    for _ in range(num_groups):
        one = one.after([float(rng.random() < p) for _ in range(n)])
    return one


def test_a_scenario_that_was_never_run() -> None:
    # Jeffreys' prior for the pass rate: 1 - 2 E[p^8] = 1 - 2 * (1/2 * 3/2 * ... * 15/2) / 8!
    no_spread = 2 * math.prod(i + 0.5 for i in range(8)) / math.factorial(8)
    assert SpreadEstimate().chance(8) == pytest.approx(1 - no_spread)
    assert SpreadEstimate().chance(8) == pytest.approx(0.607, abs=1e-3)
    assert SpreadEstimate().chance(1) == 0


def test_with_enough_groups_it_is_near_the_truth() -> None:
    rng, means = random.Random(1), []
    for p in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        chances = [estimate(p, 6, rng).chance(8) for _ in range(200)]
        means.append(sum(chances) / len(chances))
        assert means[-1] == pytest.approx(exact(p, 8), abs=0.13)
    assert means == sorted(means)
    for p in (0.0, 1.0):  # a few groups never prove that the pass rate is 0
        assert estimate(p, 6, rng).chance(8) == pytest.approx(0.16, abs=0.01)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 16))
def test_it_is_a_chance_that_falls_with_agreement(same: int, other: int, n: int) -> None:
    chance = spread_chance(same, other, n)
    assert 0 < chance < 1
    assert spread_chance(same + 1, other, n) < chance < spread_chance(same, other + 1, n)
    assert chance < spread_chance(same, other, n + 1)


def test_what_counts_is_agreement_within_a_group_and_not_the_height_of_the_reward() -> None:
    half, high, varied = SpreadEstimate(), SpreadEstimate(), SpreadEstimate()
    for group in range(6):
        half = half.after([0.5] * 8)  # a mean of 0.5 that teaches nothing
        high = high.after([float(group)] * 8)  # other rewards in each group, equal in each
        varied = varied.after([i / 7 for i in range(8)])
    assert half.chance(8) == high.chance(8) < 0.2
    assert varied.chance(8) > 0.98
    assert half.mean_reward == 0.5


def test_it_forgets_what_the_policy_did_long_ago() -> None:
    rng = random.Random(0)
    solved = estimate(1.0, 20, rng)
    assert solved.same <= 16  # half of the weight goes with each group
    for _ in range(3):
        solved = solved.after([0.0, 1.0] * 4)
    assert solved.chance(8) > 0.8
    assert solved.mean_reward == pytest.approx(0.5, abs=0.1)


def test_a_group_with_one_reward_tells_nothing() -> None:
    one = SpreadEstimate().after([1.0, 0.0])
    assert one.after([]) == one.after([1.0]) == one


@given(st.lists(st.sampled_from([0.0, 1e-7, 0.1, 0.3, 1.0, 5.0]), min_size=1, max_size=8))
def test_spread_is_what_the_trainer_calls_so(rewards: list[float]) -> None:
    config = TrainConfig()
    (group,) = compute_advantages([[RolloutRewards(name="r", reward=reward) for reward in rewards]], config)
    assert has_spread(rewards, config.spread_tolerance) == group.has_spread
