from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.config import TrainConfig
from art.errors import TrajectoryError
from art.trainer.advantages import GroupAdvantages, group_advantages

rewards_lists = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16)


def advantages(rewards: list[float], **config: object) -> GroupAdvantages:
    return group_advantages(rewards, TrainConfig(**config), names=[f"trajectory {i}" for i in range(len(rewards))])


def test_worked_example() -> None:
    assert advantages([1, 0, 0, 1]) == GroupAdvantages([0.5, -0.5, -0.5, 0.5], has_spread=True)


@pytest.mark.parametrize(
    "rewards", [[], [3.0], [1.0, 1.0], [0.1] * 3, [1 / 3] * 7, [1e12 + 0.1] * 5, [0.0, 1e-7, -1e-7], [1.7e308] * 4]
)
def test_no_spread(rewards: list[float]) -> None:
    assert advantages(rewards) == GroupAdvantages([0.0] * len(rewards), has_spread=False)


def test_tolerance_is_the_configured_one() -> None:
    assert not advantages([0.0, 0.1], spread_tolerance=0.05).has_spread
    assert advantages([0.0, 0.11], spread_tolerance=0.05).has_spread
    assert advantages([0.0, 1e-9], spread_tolerance=0).has_spread


def test_group_scale_divides_by_the_population_deviation() -> None:
    rewards = [3.0, 5.0, 10.0]
    std = statistics.pstdev(rewards)
    expected = [(r - 6) / (std + 1e-6) for r in rewards]
    assert advantages(rewards, scale_rewards="group").values == pytest.approx(expected, rel=1e-12)


@given(rewards_lists)
def test_sums_to_zero_and_keeps_order(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert abs(math.fsum(found.values)) <= 1e-9 * (1 + max(map(abs, rewards))) * len(rewards)
    if found.has_spread:
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        assert all(found.values[a] <= found.values[b] for a, b in itertools.pairwise(order))


@given(rewards_lists, st.integers(-1000, 1000))
def test_a_constant_changes_nothing(rewards: list[float], constant: int) -> None:
    found, moved = advantages(rewards), advantages([r + constant for r in rewards])
    assert found.values == pytest.approx(moved.values, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(TrajectoryError, match=r"trajectory 1 has reward"):
        advantages([1.0, bad, 0.0])
