"""Early stop of a group, and that the formulas of its cost and bias are true."""

from __future__ import annotations

import random

import pytest

from art.asynchronous.choice.early_stop import stops_early
from art.asynchronous.choice.spread import has_spread


def useful(p: float, m: int) -> float:
    return 1 - p**m - (1 - p) ** m


def test_when_a_group_ends() -> None:
    assert stops_early([1.0, 1.0, 1.0], 3)
    assert stops_early([0.0, 0.0, 0.0], 3)
    assert not stops_early([0.0, 1.0, 0.0], 3)
    assert stops_early([0.5, 0.5 + 1e-9], 2, tolerance=1e-6)
    assert not stops_early([0.5, 0.5 + 1e-9], 2)


def test_a_rollout_that_failed_lets_the_group_go_on() -> None:
    assert not stops_early([1.0, None, 1.0], 3)
    assert not stops_early([None, None], 2)


@pytest.mark.parametrize("p", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_cost_and_bias_are_those_of_the_formulas(p: float) -> None:
    n, k, num_groups = 8, 4, 20_000
    rng = random.Random(3)
    run = kept = lost = 0
    for _ in range(num_groups):
        rewards = [float(rng.random() < p) for _ in range(n)]
        stopped = stops_early(rewards[:k], k)
        run += k if stopped else n
        kept += not stopped and has_spread(rewards)
        lost += stopped and has_spread(rewards)
    assert run / num_groups == pytest.approx(k + (n - k) * useful(p, k), abs=0.06)
    assert kept / num_groups == pytest.approx(useful(p, k), abs=0.015)
    assert lost / num_groups == pytest.approx(useful(p, n) - useful(p, k), abs=0.015)


def test_the_figures_of_the_docstring() -> None:
    def per_rollout(p: float, k: int) -> float:
        return useful(p, k) / (k + (8 - k) * useful(p, k))

    assert per_rollout(0.1, 4) / (useful(0.1, 8) / 8) == pytest.approx(0.90, abs=0.005)
    assert per_rollout(0.5, 4) / (useful(0.5, 8) / 8) == pytest.approx(0.94, abs=0.005)
    assert useful(0.001, 4) / useful(0.001, 8) == pytest.approx(4 / 8, abs=0.005)
