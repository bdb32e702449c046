from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.config import TrainConfig
from art.credit.advantages import GroupAdvantages, RolloutAdvantages, compute_advantages, preference_pair
from art.credit.resolve import ResolvedTrajectory
from art.errors import TrajectoryError

rewards_lists = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16)
spread_lists = st.lists(st.integers(-50, 50).map(lambda n: n / 8), min_size=2, max_size=12).filter(
    lambda rewards: len(set(rewards)) > 1
)


def rollouts(rewards: list[float], **further: Any) -> list[ResolvedTrajectory]:
    return [ResolvedTrajectory(group=0, index=i, reward=reward, **further) for i, reward in enumerate(rewards)]


def advantages(rewards: list[float], **config: Any) -> list[float]:
    """Of the trajectories of one group without turn or token rewards."""
    (group,) = compute_advantages([rollouts(rewards)], TrainConfig(**config))
    assert all(rollout.turns == [] and rollout.tokens == [] for rollout in group.rollouts)
    return [rollout.trajectory for rollout in group.rollouts]


def has_spread(rewards: list[float], **config: Any) -> bool:
    return compute_advantages([rollouts(rewards)], TrainConfig(**config))[0].has_spread


def expected(group: list[float], batch: list[float], baseline: str, scale: str) -> list[float]:
    """The definitions, reward by reward."""
    found = []
    for i, reward in enumerate(group):
        others = [other for j, other in enumerate(group) if j != i]
        base = statistics.fmean(others if baseline == "leave_one_out" else group)
        divisors = {
            "none": 1.0,
            "group": math.sqrt(sum((r - statistics.fmean(group)) ** 2 for r in group) / len(group)) + 1e-6,
            "batch": math.sqrt(sum((r - statistics.fmean(batch)) ** 2 for r in batch) / len(batch)) + 1e-6,
            "mean": statistics.fmean(group),
        }
        found.append((reward - base) / divisors[scale])
    return found


# -- baseline and scale --


def test_worked_example() -> None:
    (group,) = compute_advantages([rollouts([1, 0, 0, 1])], TrainConfig())
    expected = [RolloutAdvantages(trajectory=value, turns=[], tokens=[]) for value in (0.5, -0.5, -0.5, 0.5)]
    assert group == GroupAdvantages(rollouts=expected, has_spread=True)


@pytest.mark.parametrize(
    ("baseline", "scale"), [*itertools.product(["mean", "leave_one_out"], ["none", "group", "batch"]), ("mean", "mean")]
)
def test_every_baseline_and_scale(baseline: str, scale: str) -> None:
    groups = [[1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0], [1.0, 1.0, 1.0]]
    if scale != "mean":
        groups += [[3.0, -5.0, 10.0], [0.25]]
    config = TrainConfig(baseline=baseline, scale_rewards=scale)
    found = compute_advantages([rollouts(group) for group in groups], config)
    batch = list(itertools.chain(*groups))
    for rewards, group in zip(groups, found, strict=True):
        values = [rollout.trajectory for rollout in group.rollouts]
        if len(set(rewards)) == 1:
            assert values == [0.0] * len(rewards)
            assert not group.has_spread
        else:
            assert values == pytest.approx(expected(rewards, batch, baseline, scale), rel=1e-12)
            assert group.has_spread


@given(rewards_lists)
def test_sums_to_zero_and_keeps_order(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert abs(math.fsum(found)) <= 1e-9 * (1 + max(map(abs, rewards))) * len(rewards)
    if has_spread(rewards):
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))


@given(spread_lists, st.permutations(range(12)), st.sampled_from(["none", "group", "batch"]))
def test_the_order_of_rollouts_does_not_matter(rewards: list[float], order: list[int], scale: str) -> None:
    order = [i for i in order if i < len(rewards)]
    found, moved = (
        advantages(rewards, scale_rewards=scale),
        advantages([rewards[i] for i in order], scale_rewards=scale),
    )
    assert moved == pytest.approx([found[i] for i in order], rel=1e-12, abs=1e-12)


@given(rewards_lists, st.integers(-1000, 1000))
def test_a_constant_changes_nothing(rewards: list[float], constant: int) -> None:
    assert advantages(rewards) == pytest.approx(advantages([r + constant for r in rewards]), abs=1e-5)


@given(spread_lists, st.floats(1, 100))
def test_the_unit_of_rewards_does_not_matter_when_scaled(rewards: list[float], unit: float) -> None:
    found = advantages(rewards, scale_rewards="group")
    assert advantages([unit * r for r in rewards], scale_rewards="group") == pytest.approx(found, rel=1e-4)
    assert statistics.pstdev(found) == pytest.approx(1, rel=1e-4)


@given(spread_lists)
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_1(rewards: list[float]) -> None:
    n = len(rewards)
    expected = [value * n / (n - 1) for value in advantages(rewards)]
    assert advantages(rewards, baseline="leave_one_out") == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.integers(1, 15), st.integers(1, 15))
def test_maximum_likelihood_weighs_a_success_by_how_rare_it_is(num_failed: int, num_passed: int) -> None:
    found = advantages([0.0] * num_failed + [1.0] * num_passed, scale_rewards="mean")
    rate = num_passed / (num_failed + num_passed)
    assert found == pytest.approx([-1.0] * num_failed + [(1 - rate) / rate] * num_passed, rel=1e-9)


def test_the_scale_of_the_batch_keeps_even_groups_quiet() -> None:
    near, far = [0.5, 0.51], [0.0, 10.0]
    by_group = compute_advantages([rollouts(near), rollouts(far)], TrainConfig(scale_rewards="group"))
    by_batch = compute_advantages([rollouts(near), rollouts(far)], TrainConfig(scale_rewards="batch"))
    assert by_group[0].rollouts[1].trajectory == pytest.approx(by_group[1].rollouts[1].trajectory, rel=1e-3)
    assert by_batch[0].rollouts[1].trajectory == pytest.approx(by_batch[1].rollouts[1].trajectory / 1000, rel=1e-3)


# -- spread --


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize(
    "rewards", [[3.0], [1.0, 1.0], [0.1] * 3, [1 / 3] * 7, [1e12 + 0.1] * 6, [0.0, 1e-7, -1e-7], [1e29] * 4]
)
def test_no_spread(rewards: list[float], scale: str) -> None:
    assert advantages(rewards, scale_rewards=scale) == [0.0] * len(rewards)
    assert not has_spread(rewards, scale_rewards=scale)


def test_a_group_of_none() -> None:
    assert compute_advantages([[]], TrainConfig()) == [GroupAdvantages(rollouts=[], has_spread=False)]


def test_rewards_within_the_tolerance_have_no_spread() -> None:
    assert not has_spread([0.0, 2e-6])
    assert has_spread([0.0, 2.2e-6])


# -- turn and token rewards --


def part(reward: float, turns: list[float], tokens: list[list[float]] | None = None) -> ResolvedTrajectory:
    return ResolvedTrajectory(
        group=0,
        index=0,
        reward=reward,
        turn_rewards=turns,
        token_rewards=tokens or [],
        num_choices=len(turns or tokens or []),
    )


def test_turn_rewards_count_for_their_turn_and_those_before() -> None:
    """Rewards 1 and 0, mean 0.5. Turn rewards 1, 0, 4 and -1, mean 1: centred 0, -1, 3 and -2."""
    (group,) = compute_advantages([[part(1, [1, 0, 4]), part(0, [-1])]], TrainConfig())
    long, short = group.rollouts
    assert (long.trajectory, long.turns, short.trajectory, short.turns) == (0.5, [2, 2, 3], -0.5, [-2])
    assert [long.of_choice(choice) for choice in (0, 1, 2)] == [[2.5], [2.5], [3.5]]
    assert long.of_choice(None) == [0.5], "a further conversation has the trajectory's advantage alone"


def test_token_rewards_count_for_their_token_and_those_before() -> None:
    """Token rewards 1, 0 | 5 and 0, -1, mean 1: centred 0, -1 | 4 and -1, -2. An empty answer has none."""
    (group,) = compute_advantages([[part(1, [], [[1, 0], [], [5]]), part(1, [], [[0, -1]])]], TrainConfig())
    first, second = group.rollouts
    assert group.has_spread, "by its token rewards alone"
    assert (first.tokens, second.tokens) == ([[3, 3], [], [4]], [[-3, -2]])
    assert (first.of_choice(0), first.of_choice(2), first.of_choice(None)) == ([3, 3], [4], [0])


def test_turn_and_token_rewards_add_up() -> None:
    both = [part(1, [2, 0], [[1], [3]]), part(0, [0, 2], [[0], [0]])]
    alone = [compute_advantages([[change(r) for r in both]], TrainConfig())[0] for change in (only_turns, only_tokens)]
    (group,) = compute_advantages([both], TrainConfig())
    for i, rollout in enumerate(group.rollouts):
        for choice in (0, 1):
            (found,) = rollout.of_choice(choice)
            parts = [of.rollouts[i].of_choice(choice)[0] - of.rollouts[i].trajectory for of in alone]
            assert found == rollout.trajectory + sum(parts)


def only_turns(rollout: ResolvedTrajectory) -> ResolvedTrajectory:
    return part(rollout.reward, list(rollout.turn_rewards))


def only_tokens(rollout: ResolvedTrajectory) -> ResolvedTrajectory:
    return part(rollout.reward, [], [list(tokens) for tokens in rollout.token_rewards])


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_turn_rewards_have_the_same_baseline_and_scale(baseline: str, scale: str) -> None:
    groups = [[[1.0, 0.5], [0.0], [2.0, 0.0, -1.0]], [[1.0], [3.0, 3.0]]]
    config = TrainConfig(baseline=baseline, scale_rewards=scale)
    found = compute_advantages([[part(0, turns) for turns in group] for group in groups], config)
    everything = [value for group in groups for turns in group for value in turns]
    for group, result in zip(groups, found, strict=True):
        flat = list(itertools.chain(*group))
        scales = {"none": 1.0, "group": statistics.pstdev(flat) + 1e-6, "batch": statistics.pstdev(everything) + 1e-6}
        for i, turns in enumerate(group):
            others = [value for j, other in enumerate(group) for value in other if j != i]
            base = statistics.fmean(others if baseline == "leave_one_out" else flat)
            single = [(value - base) / scales[scale] for value in turns]
            assert result.rollouts[i].turns == pytest.approx([sum(single[t:]) for t in range(len(turns))], rel=1e-12)


def test_without_others_there_is_nothing_to_leave_one_out_of() -> None:
    lone = [[part(1, [0, 1]), ResolvedTrajectory(group=0, index=1, reward=1)]]
    assert compute_advantages(lone, TrainConfig())[0].has_spread
    assert not compute_advantages(lone, TrainConfig(baseline="leave_one_out"))[0].has_spread


# -- preferences --


def pair(rewards: list[float]) -> tuple[int, int] | None:
    return preference_pair(rollouts(rewards))


def test_preference_pair() -> None:
    assert pair([0.0, 2.0, 1.0]) == (1, 0)
    assert pair([1.0, 0.0, 1.0, 0.0]) == (0, 1), "of equal ones the first"
    assert pair([]) is pair([1.0]) is pair([1.0, 1.0]) is pair([1.0, 1.0 - 5e-7]) is None


# -- errors --


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_named(bad: float) -> None:
    for call in (advantages, pair):
        with pytest.raises(TrajectoryError, match=r"trajectories\[1\] has reward"):
            call([1.0, bad, 0.0])
    for group in ([part(1, [0.0, bad])], [part(1, [], [[0.0, bad]])]):
        with pytest.raises(TrajectoryError, match="not a finite number"):
            compute_advantages([group], TrainConfig())


def test_all_rollouts_of_a_group_have_turn_rewards_or_none() -> None:
    whole = ResolvedTrajectory(group=0, index=1, reward=1, num_choices=2)
    for kind, with_them in (("turn_rewards", part(1, [1, 2])), ("token_rewards", part(1, [], [[1], [2]]))):
        with pytest.raises(
            TrajectoryError, match=rf"\[1\] has no {kind}, but groups\[0\].trajectories\[0\] of the same group has"
        ):
            compute_advantages([[with_them, whole]], TrainConfig())
    compute_advantages([[part(1, [1, 2])], [whole]], TrainConfig())  # groups may differ


def test_maximum_likelihood_takes_success_or_failure_only() -> None:
    with pytest.raises(TrajectoryError, match=r"trajectories\[1\] has reward 0\.5"):
        advantages([1.0, 0.5], scale_rewards="mean")
    with pytest.raises(TrajectoryError, match="turn or token rewards"):
        compute_advantages([[part(1, [1, 2])]], TrainConfig(scale_rewards="mean"))


def test_preferences_do_not_take_turn_rewards() -> None:
    with pytest.raises(TrajectoryError, match="turn or token rewards, but a preference pair compares whole rollouts"):
        preference_pair([part(1, [1, 2])])
