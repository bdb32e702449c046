"""Intervals of scores and of paired differences, against independent computations."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from art.metrics.scores import estimate_change, mean_with_interval, score_difference, score_scenarios, tango_interval
from benchmarks.verdicts import mistakes, wins

Z = 1.959964


def log_likelihood(gained: int, lost: int, pairs: int, share_lost: float, difference: float) -> float:
    shares = (share_lost + difference, share_lost, 1 - 2 * share_lost - difference)
    total = 0.0
    for count, share in zip((gained, lost, pairs - gained - lost), shares, strict=True):
        if count:
            total += count * math.log(share) if share > 0 else -math.inf
    return total


def slow_statistic(gained: int, lost: int, pairs: int, difference: float) -> float:
    """Score statistic, with the share of losses found by a search for the most likely one."""
    low, high = max(0.0, -difference), (1 - difference) / 2
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if log_likelihood(gained, lost, pairs, a, difference) < log_likelihood(gained, lost, pairs, b, difference):
            low = a
        else:
            high = b
    share = (low + high) / 2
    variance = (2 * share + difference - difference**2) / pairs
    return ((gained - lost) / pairs - difference) / math.sqrt(variance)


@pytest.mark.parametrize(("gained", "lost", "pairs"), [(20, 5, 100), (3, 9, 40), (7, 7, 30), (1, 0, 15), (12, 1, 400)])
def test_tangos_interval_ends_where_the_score_test_rejects(gained: int, lost: int, pairs: int) -> None:
    low, high = tango_interval(gained, lost, pairs)
    assert slow_statistic(gained, lost, pairs, low) == pytest.approx(Z, abs=1e-3)
    assert slow_statistic(gained, lost, pairs, high) == pytest.approx(-Z, abs=1e-3)


@pytest.mark.parametrize("lost", range(12))
def test_tangos_interval_excludes_zero_when_mcnemars_test_does(lost: int) -> None:
    gained, pairs = 20, 60
    low, _ = tango_interval(gained, lost, pairs)
    assert (low > 0) == ((gained - lost) / math.sqrt(gained + lost) > Z)
    mirrored = tango_interval(lost, gained, pairs)
    assert mirrored == pytest.approx(tuple(-end for end in tango_interval(gained, lost, pairs)[::-1]))


def test_tangos_interval_has_a_width_where_nothing_differs() -> None:
    low, high = tango_interval(0, 0, 20)
    assert high == pytest.approx(Z**2 / (20 + Z**2), abs=1e-6)
    assert low == pytest.approx(-high)


def test_paired_intervals_hold_the_true_difference_in_19_of_20_comparisons() -> None:
    rng = random.Random(5)
    hits, trials, num = 0, 1000, 40
    for _ in range(trials):
        pairs = []
        for _ in range(num):
            difficulty = rng.random()
            pairs.append((float(rng.random() < 0.5 * difficulty), float(rng.random() < 0.5 * difficulty + 0.3)))
        score = score_difference([[old] for old, _ in pairs], [[new] for _, new in pairs])
        assert score.method == "tango"
        hits += score.low is not None and score.high is not None and score.low <= 0.3 <= score.high
    assert 0.93 <= hits / trials <= 0.975


def test_scores_of_single_rollouts_are_wilsons() -> None:
    score = score_scenarios([[1.0]] * 50 + [[0.0]] * 50)
    assert (score.method, score.num) == ("wilson", 100)
    assert (score.low, score.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert score_scenarios([[1.0]] * 20).low == pytest.approx(0.839, abs=1e-3)


def test_several_rollouts_of_a_scenario_count_as_one_value() -> None:
    scenarios = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    score = score_scenarios(scenarios)
    means = [0.75, 0.0, 1.0]
    half = 4.3027 * statistics.stdev(means) / math.sqrt(3)
    assert (score.method, score.num, score.mean) == ("t", 3, pytest.approx(statistics.fmean(means)))
    assert score.low == pytest.approx(score.mean - half, abs=1e-3)
    perfect = score_scenarios([[1.0, 1.0]] * 20)
    assert (perfect.method, perfect.high) == ("wilson", 1.0)
    assert perfect.low == pytest.approx(0.839, abs=1e-3)


def test_differences_of_other_measures_are_students() -> None:
    old, new = [[0.1, 0.3], [0.5, 0.5], [0.9, 0.7]], [[0.4], [0.5], [1.1]]
    score = score_difference(old, new)
    changes = [0.2, 0.0, 0.3]
    assert score.method == "t"
    assert score.mean == pytest.approx(statistics.fmean(changes))
    assert score.high == pytest.approx(score.mean + 4.3027 * statistics.stdev(changes) / math.sqrt(3), abs=1e-3)


def test_a_single_scenario_has_no_interval() -> None:
    score = score_difference([[0.25]], [[0.75]])
    assert (score.mean, score.low, score.high) == (0.5, None, None)
    assert score.text(sign=True) == "+0.50"


def test_nothing_to_compare_is_an_error() -> None:
    for call in (lambda: score_scenarios([]), lambda: score_difference([], []), lambda: score_difference([[1.0]], [])):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(("num", "least"), [(4, 0.93), (16, 0.93)])
def test_the_interval_of_a_mean_holds_it_in_19_of_20_small_samples(num: int, least: float) -> None:
    rng, hits, trials = random.Random(num), 0, 1000
    for _ in range(trials):
        low, high = mean_with_interval([rng.gauss(0, 1) for _ in range(num)])[1]
        hits += low <= 0 <= high
    assert least <= hits / trials <= 0.97


def test_a_change_is_measured_on_the_scenarios_that_both_evaluations_have() -> None:
    before, after = [("a", 0.0), ("b", 1.0), ("c", 0.0)], [("c", 1.0), ("a", 0.0), ("d", 1.0)]
    change = estimate_change(before, after)
    assert (change.mean, change.count) == (0.5, 2)
    score = score_difference([[0.0], [0.0]], [[0.0], [1.0]])
    assert (change.low, change.high) == (score.low, score.high)


def test_evaluations_without_a_common_scenario_have_newcombes_interval() -> None:
    """Row (a) of table II of Newcombe (1998), method 10: 56/70 against 48/80."""
    before, after = [(None, float(i < 48)) for i in range(80)], [(None, float(i < 56)) for i in range(70)]
    change = estimate_change(before, after)
    assert (change.mean, change.low, change.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    turned = estimate_change(after, before)
    assert (turned.low, turned.high) == pytest.approx((-change.high, -change.low))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_equal_policies_are_seldom_called_better_or_worse(share: float, paired: bool) -> None:
    """`python -m benchmarks verdicts` has many more of these figures; 2.5 on each side is what a 95 % interval allows."""
    better, worse = map(float, mistakes(wins(share), 500, paired, 50).split(" / "))
    assert better <= 4.6, "3 standard deviations above 2.5"
    assert worse <= 4.6
