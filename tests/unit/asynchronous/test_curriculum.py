"""The curriculum: what it prefers, what it never forgets, and that a restart goes on exactly."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.asynchronous import curriculum as curriculum_module
from art.asynchronous.curriculum import FLOOR, Curriculum, SpreadEstimate, has_spread, spread_chance
from art.config import TrainConfig
from art.config.pipeline import PipelineConfig
from art.credit.advantages import RolloutRewards, compute_advantages
from art.errors import ConfigError


def make(num_scenarios: int = 40, *, seed: int = 0) -> Curriculum:
    return Curriculum(num_scenarios, seed=seed, num_rollouts=8)


class Run:
    """Groups of scenarios with known pass rates, a few of which run at a time."""

    def __init__(self, rates: list[float], curriculum: Curriculum, *, seed: int = 0, at_once: int = 4) -> None:
        self.rates, self.curriculum, self.seed, self.at_once = rates, curriculum, seed, at_once
        self.position = 0
        self.chosen: list[int] = []
        self.running: list[tuple[int, int]] = []
        """Position and scenario of each group that runs."""

    def rewards(self, position: int, index: int) -> list[float]:
        rng = random.Random(f"{self.seed} {position}")
        return [float(rng.random() < self.rates[index]) for _ in range(8)]

    def go(self, num_groups: int) -> list[int]:
        """Start groups; the oldest ends when there are too many. Returns the chosen scenarios."""
        for _ in range(num_groups):
            if len(self.running) == self.at_once:
                position, index = self.running.pop(0)
                self.curriculum.report(index, self.rewards(position, index))
            index = self.curriculum.next(self.position).index
            self.running.append((self.position, index))
            self.chosen.append(index)
            self.position += 1
        return self.chosen


RATES = [0.0] * 14 + [1.0] * 14 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9, 0.9]
"""14 scenarios that are never solved, 14 that always are, and 12 that teach."""


def test_it_prefers_scenarios_whose_groups_have_spread() -> None:
    chosen = Run(RATES, make()).go(1200)[400:]
    teaching = sum(index >= 28 for index in chosen) / len(chosen)
    assert teaching > 0.55  # 12 of 40 are 0.3
    counts = Counter(chosen)
    assert min(counts[index] for index in range(40)) >= 0.1 * 800 / 40


def test_without_reports_everything_is_chosen_about_equally_often() -> None:
    curriculum = make()
    counts: Counter[int] = Counter()
    for position in range(4000):
        index = curriculum.next(position).index
        counts[index] += 1
        curriculum.report(index, [])  # lost: tells nothing
    assert 60 < min(counts.values()) <= max(counts.values()) < 145


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6), st.integers(1, 6))
def test_no_scenario_waits_longer_than_promised(num: int, seed: int, at_once: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(num)]
    chosen = Run(rates, make(num, seed=seed), seed=seed, at_once=at_once).go(int(3 * num / FLOOR) + 50)
    longest = num / FLOOR + 1 + at_once / FLOOR  # a scenario that runs misses its turn, and needs none
    last = dict.fromkeys(range(num), -1)
    for position, index in enumerate(chosen):
        last[index] = position
        assert max(position - at for at in last.values()) <= longest


def test_the_first_turns_go_to_scenarios_that_were_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum_module, "FLOOR", 1.0)  # every choice is a turn
    curriculum = make(10)
    first = [curriculum.next(position).index for position in range(10)]
    assert sorted(first) == list(range(10))
    assert first != list(range(10))  # in a seeded order
    assert first[0] == make(10).next(0).index
    assert curriculum.next(10).index in range(10)  # all have a group under way: there is no other choice


def test_a_scenario_with_a_group_under_way_is_chosen_less() -> None:
    curriculum = make(12)
    chosen = Counter(curriculum.next(position).index for position in range(24))
    assert len(chosen) >= 11
    assert max(chosen.values()) <= 4


def test_in_a_short_list_scenarios_that_teach_are_chosen_several_times_at_once() -> None:
    chosen = Run([0.0] * 5 + [1.0] * 5 + [0.5] * 2, make(12), at_once=8).go(400)[200:]
    assert sum(index >= 10 for index in chosen) > 0.6 * len(chosen)


def test_the_same_seed_and_reports_give_the_same_choices() -> None:
    first, again, other = (Run(RATES, make(seed=seed)).go(300) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("stop_at", [1, 37, 200])
def test_a_restart_goes_on_as_if_nothing_had_happened(stop_at: int) -> None:
    undisturbed = Run(RATES, make()).go(400)
    before = Run(RATES, make())
    before.go(stop_at)
    state = json.loads(json.dumps(before.curriculum.state()))
    after = Run(RATES, make())
    after.curriculum.restore(state)
    for position, index in before.running:  # their plans are in the journal
        after.curriculum.resume(position, index)
    after.running, after.position, after.chosen = before.running, before.position, before.chosen
    assert after.go(400 - stop_at) == undisturbed


def test_choices_made_after_the_state_was_stored_are_taken_up_from_their_plans() -> None:
    run = Run(RATES, make(), at_once=100)
    run.go(10)
    state = run.curriculum.state()
    run.go(20)  # ten further groups were started, and none was reported
    resumed = make()
    resumed.restore(state)
    for position, index in run.running:
        resumed.resume(position, index)
    assert resumed.state() == run.curriculum.state()
    assert [resumed.next(position) for position in range(30, 34)] == [
        run.curriculum.next(position) for position in range(30, 34)
    ]


def test_restoring_forgets_what_was_not_stored() -> None:
    run = Run(RATES, make())
    state = json.loads(json.dumps(run.go(30) and run.curriculum.state()))
    run.go(50)
    run.curriculum.restore(state)  # the second call of `train` of one pipeline
    fresh = make()
    fresh.restore(state)
    assert [run.curriculum.next(position) for position in range(30, 60)] == [
        fresh.next(position) for position in range(30, 60)
    ]
    run.curriculum.restore({})
    assert run.curriculum.next(0) == make().next(0)


def test_the_state_is_small() -> None:
    run = Run([0.5] * 1000, make(1000))
    run.go(1000)
    seen = len(run.curriculum.state()["scenarios"])
    assert len(json.dumps(run.curriculum.state())) < 45 * seen


def test_a_longer_list_is_fine_and_a_shorter_one_is_an_error() -> None:
    run = Run(RATES, make())
    run.go(100)
    state = run.curriculum.state()
    longer = make(60)
    longer.restore(state)
    assert max(longer.next(position).index for position in range(100, 200)) >= 40
    with pytest.raises(ConfigError, match="the list has only 5 scenarios"):
        make(5).restore(state)
    with pytest.raises(ConfigError, match="only 5 scenarios"):
        make(5).resume(3, 17)


def test_the_reason_tells_what_was_known() -> None:
    curriculum = make(1)
    first = curriculum.next(0)
    assert first.reason == {
        "chosen_by": "chance of spread", "spread_chance": 0.607, "groups_before": 0, "positions_waited": 1
    }  # fmt: skip
    curriculum.report(0, [0.0, 2.0, 2.0, 2.0])
    reason = curriculum.next(9).reason
    assert (reason["chosen_by"], reason["pass_rate"], reason["groups_before"]) == ("turn", 0.75, 1)


def test_the_metrics_tell_what_was_chosen_and_are_counted_once() -> None:
    run = Run(RATES, make())
    run.go(200)
    metrics = run.curriculum.metrics()
    assert metrics["pipeline/choice_by_turn_share"] == FLOOR
    assert metrics["pipeline/choice_seen_share"] == 1
    assert metrics["pipeline/choice_new_share"] == 40 / 200
    assert 0.5 < metrics["pipeline/choice_spread_chance"] < 0.95
    assert 0.2 < metrics["pipeline/choice_pass_rate"] < 0.8
    assert metrics["pipeline/choice_waited_max"] > 10
    assert run.curriculum.metrics() == {"pipeline/choice_seen_share": 1}


@pytest.mark.parametrize(("num", "rollouts"), [(0, 8), (5, 1)])
def test_settings_that_make_no_sense(num: int, rollouts: int) -> None:
    with pytest.raises(ConfigError, match="a curriculum needs"):
        Curriculum(num, seed=0, num_rollouts=rollouts)
    with pytest.raises(ConfigError, match="groups of one rollout have none"):
        PipelineConfig(curriculum=True, rollouts_per_group=1)


# -- the estimate --


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
    (group,) = compute_advantages([[RolloutRewards(name="r", reward=reward) for reward in rewards]], TrainConfig())
    assert has_spread(rewards) == group.has_spread
