from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from art.config import DistillConfig, DpoConfig, DppoConfig, SftConfig, TrainConfig
from art.credit.ledger import close_ledger, close_unused_ledger, describe_rollouts
from art.credit.plan import StepPlan, plan_step
from art.credit.resolve import ResolvedGroup
from art.errors import NothingTrainableError, TrainingError, TrajectoryError
from art.metrics import catalogue
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from tests.support.metric_names import find_metric
from tests.support.recorded_exchanges import (
    BRANCH,
    BRANCHING,
    FIRST,
    LONG,
    LONG_TURN,
    ONE_TURN,
    SECOND,
    TWO_TURNS,
    UNTRACKED,
    USER,
    choice,
    exchange,
    group,
    resolved,
    samples_of,
    trajectory,
)

DISTILL = DistillConfig(teacher="p/teacher")


def plan(*groups: WireGroup | list[WireTrajectory], step: int = 3, **config: Any) -> StepPlan:
    return plan_step(resolved(*groups), TrainConfig(**config), step=step)


# -- samples --


def test_a_sample_is_a_token_path() -> None:
    found = plan(group(1.0, 0.0), step=4)
    assert len(found.samples) == 2
    sample = samples_of(found)[0]
    assert (sample.sample_id, sample.rollout_id) == ("groups[0].trajectories[0].paths[0]", "groups[0].trajectories[0]")
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.loss_mask == [False, False, False, True, True, False, True, True]
    assert sample.sampling_logprobs == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert sample.advantages == [0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert sample.policy_version == 2
    assert found.metrics["offpolicy/max_staleness"] == 2


def test_turn_rewards_reach_the_tokens_of_their_turn() -> None:
    """Turn rewards 0, 2 and 1, 1: mean 1, centred -1, 1 and 0, 0."""
    found = plan([trajectory(1.0, turn_rewards=[0, 2]), trajectory(0.0, turn_rewards=[1, 1])])
    assert samples_of(found)[0].advantages == [0, 0, 0, 0.5, 0.5, 0, 1.5, 1.5]
    assert samples_of(found)[1].advantages == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5]


def test_token_rewards_reach_their_tokens() -> None:
    """Mean 1; centred 3, -1 | -1, -1 and 0, 0 | 0, 0; each token has its own and those behind it."""
    rewards = [[[4, 0], [0, 0]], [[1, 1], [1, 1]]]
    found = plan([trajectory(1.0, token_rewards=value) for value in rewards])
    assert samples_of(found)[0].advantages == [0, 0, 0, 0, -3, 0, -2, -1]
    assert samples_of(found)[1].advantages == [0.0] * 8


def test_a_further_history_has_the_advantage_of_its_trajectory() -> None:
    both = [trajectory(r, ONE_TURN, LONG_TURN, turn_rewards=[t]) for r, t in ((1.0, 4), (0.0, 0))]
    found = plan(both)
    assert [sorted(set(s.advantages)) for s in samples_of(found)[:2]] == [[0, 2.5], [0, 0.5]]


def test_samples_keep_their_temperature() -> None:
    exchanges = FIRST, replace(SECOND, temperature=0.7)
    planned = plan_step(resolved(group(1.0, 0.0), exchanges=exchanges), TrainConfig(), step=3)
    assert [s.temperature for s in samples_of(planned, *exchanges)] == [1.0, 0.7, 1.0, 0.7]


# -- the ledger --


def test_ledger_closes_and_names_what_was_dropped() -> None:
    found = plan(group(1.0, 0.0), group(0.3, 0.3, 0.3))
    assert found.ledger == {
        "ledger/sampled_tokens": 20,
        "ledger/trained_tokens": 8,
        "ledger/context_tokens": 0,
        "ledger/untracked_choices": 0,
        "ledger/dropped_tokens/no_reward_spread": 12,
    }
    assert found.metrics["data/step_num_groups_submitted"] == 2
    assert found.metrics["data/step_num_groups_trainable"] == 1
    assert found.metrics["data/step_num_trajectories"] == 5


def every_kind() -> list[ResolvedGroup]:
    """Branches, an opponent's answers, choices made elsewhere, silence, equal rewards, a group of one."""
    return resolved(
        [trajectory(r, BRANCHING, LONG_TURN) for r in (1.0, 0.0)],
        [trajectory(r) for r in (1.0, 0.5, 0.0)],
        [trajectory(1.0, UNTRACKED), trajectory(0.0, ONE_TURN), trajectory(0.0, ONE_TURN)],
        group(0.5, 0.5),
        group(1.0),
        exchanges=(FIRST, replace(SECOND, name="opponent"), BRANCH, LONG),
    )


@pytest.mark.parametrize(
    ("loss", "trained", "dropped"),
    [
        (DppoConfig(), 18 + 6 + 4, {"no_reward_spread": 4 + 2}),
        (SftConfig(), 18 + 6 + 4, {"no_reward_spread": 4 + 2}),
        (DISTILL, 18 + 6 + 4 + 4 + 2, {}),
        ((DppoConfig(), DISTILL), 18 + 6 + 4 + 4 + 2, {}),
        (DpoConfig(), 18 + 4, {"no_reward_spread": 4 + 4 + 2, "no_preference_pair": 2}),
    ],
)
def test_ledger_closes_for_every_loss(loss: Any, trained: int, dropped: dict[str, int]) -> None:
    ledger = plan_step(every_kind(), TrainConfig(loss=loss), step=3).ledger
    assert ledger["ledger/trained_tokens"] == trained
    assert ledger["ledger/context_tokens"] == 3 * 2 + 2 * 2 + 2
    assert ledger["ledger/untracked_choices"] == 1
    assert {k.rsplit("/", 1)[1]: v for k, v in ledger.items() if "dropped" in k} == dropped
    assert ledger["ledger/sampled_tokens"] == trained + ledger["ledger/context_tokens"] + sum(dropped.values())


def test_the_ledger_is_closed_with_what_the_trainer_left_out() -> None:
    ledger = plan(group(1.0, 0.0)).ledger
    trained = {"data/step_trainable_tokens": 8.0, "offpolicy/mismatch_masked_tokens": 4.0}
    closed = close_ledger(ledger, trained)
    assert closed["ledger/trained_tokens"] == 4
    assert closed["ledger/dropped_tokens/sampler_mismatch"] == 4
    assert close_ledger(ledger, trained | {"offpolicy/mismatch_masked_tokens": 0.0}) == ledger
    refused = {"data/step_trainable_tokens": 6.0, "offpolicy/constraint_refused_tokens": 2.0}
    closed = close_ledger(ledger, refused | {"offpolicy/mismatch_masked_tokens": 1.0})
    assert closed["ledger/trained_tokens"] == 5
    assert closed["ledger/dropped_tokens/constraint_mismatch"] == 2
    with pytest.raises(TrainingError, match="8 tokens were planned, 7 were trained"):
        close_ledger(ledger, {"data/step_trainable_tokens": 7.0})


# -- distillation and preferences --


def test_distillation_alone_looks_at_no_rewards() -> None:
    found = plan(group(1.0, 1.0), loss=DISTILL)
    assert len(found.samples) == 2
    (twins,) = found.findings  # of these tests' own making
    assert twins.startswith("groups[0].trajectories[1]: the same recorded answers as an earlier trajectory")
    beside = plan(group(1.0, 0.0), group(1.0, 1.0), loss=(DppoConfig(), DISTILL))
    assert [max(sample.advantages) for sample in samples_of(beside)] == [0.5, 0, 0, 0]
    assert beside.findings[:-1] == ["groups[1]: all rewards are equal, only distillation learns from it"]


def test_preference_pairs_name_rollouts() -> None:
    found = plan(group(0.5, 1.0, 0.0), loss=DpoConfig())
    assert found.pairs == [("groups[0].trajectories[1]", "groups[0].trajectories[2]")]
    assert [sample.rollout_id for sample in found.samples] == [name for pair in found.pairs for name in pair]
    assert all(set(sample.advantages) == {0.0} for sample in samples_of(found)), "the trainer knows them"
    assert found.metrics["data/step_num_pairs"] == 1


def test_a_silent_trajectory_is_in_no_pair() -> None:
    members = [trajectory(1.0), trajectory(0.5), trajectory(0.0, UNTRACKED)]
    assert plan(members, loss=DpoConfig()).pairs == [("groups[0].trajectories[0]", "groups[0].trajectories[1]")]


# -- findings and metrics --


def test_findings_name_what_was_left_out() -> None:
    silent = [trajectory(1.0, UNTRACKED), trajectory(0.0)]
    found = plan(group(1.0, 0.0), group(0.1, 0.1), group(1.0), group(2.0, 2.0), silent)
    assert found.findings[:-1] == [
        "groups[1], groups[3]: all rewards are equal, nothing to learn",
        "groups[2]: a single trajectory has no other to be compared with, nothing to learn",
        "groups[4].trajectories[0]: no tokens that this model sampled, so there is nothing of it to train",
    ]
    many = plan(group(1.0, 0.0), *[group(0.1, 0.1)] * 14)
    assert many.findings[0].startswith("groups[1], groups[2], ")
    assert "groups[12] and 2 more: all rewards" in many.findings[0]


def test_a_group_of_silent_trajectories_is_not_trainable() -> None:
    found = plan(group(1.0, 0.0), group(1.0, 0.0, history=UNTRACKED))
    assert found.metrics["data/step_num_groups_submitted"] == 2
    assert found.metrics["data/step_num_groups_trainable"] == 1


def test_an_empty_answer_gives_no_sample() -> None:
    nothing = exchange("e0", [1, 2, 3], [], messages=[], text="")
    members = [trajectory(1.0, ONE_TURN), trajectory(0.0, WireHistory(items=[choice("e0", "")]))]
    found = plan_step(resolved(members, exchanges=(FIRST, nothing)), TrainConfig(normalize="rollout"), step=3)
    assert [sample.rollout_id for sample in found.samples] == ["groups[0].trajectories[0]"]
    assert samples_of(found)[0].advantages[-1] == 0.5, "its reward counts in the mean"


# -- nothing to learn --


def unrewarded(count: int) -> WireGroup:
    return WireGroup(trajectories=[WireTrajectory(histories=[TWO_TURNS]) for _ in range(count)])


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([group(0.5, 0.5), group(1.0, 1.0)], r"every group \(2\) has equal rewards \(their mean is 0.75\): "),
        ([group(1.0), group(0.0)], r"every group \(2\) holds a single trajectory: "),
        ([unrewarded(2), unrewarded(3)], r"none of the 5 trajectories was ever given a reward: all count as 0"),
        ([unrewarded(1)], r"every group \(1\) holds a single trajectory: "),
        ([group(1.0), group(0.5, 0.5), unrewarded(2)], r"none of the 3 groups can be learnt from: "),
        ([group(1.0, 0.0, history=WireHistory(items=[USER]))], r"none of the 2 trajectories holds an answer"),
    ],
)
@pytest.mark.parametrize("loss", [DppoConfig(), DpoConfig()])
def test_a_step_with_nothing_to_learn_says_why(groups: list[WireGroup], why: str, loss: Any) -> None:
    found = plan(*groups, loss=loss)
    assert (found.samples, found.pairs, found.exchange_ids) == ([], [], [])
    assert re.match(why, found.findings[0])
    assert "so no step was trained and the model is where it was" in found.findings[0]
    assert found.metrics["data/step_num_groups_trainable"] == 0
    assert found.metrics["data/step_num_groups_submitted"] == len(groups)
    dropped = found.ledger.get("ledger/dropped_tokens/no_reward_spread", 0)
    assert found.ledger["ledger/sampled_tokens"] == dropped
    assert found.ledger["ledger/trained_tokens"] == 0


def test_reasons_are_told_apart_by_group() -> None:
    found = plan(group(1.0), group(0.5, 0.5), unrewarded(2), group(1.0, 0.0))
    assert found.findings[:-1] == [
        "groups[1]: all rewards are equal, nothing to learn",
        "groups[2]: no trajectory was ever given a reward, nothing to learn",
        "groups[0]: a single trajectory has no other to be compared with, nothing to learn",
    ]


def test_a_turn_reward_is_a_reward() -> None:
    rewarded = [WireTrajectory(histories=[TWO_TURNS], turn_rewards=[1, 1]) for _ in range(2)]
    assert "has equal rewards" in plan(rewarded).findings[0]


def test_the_trainer_refuses_what_was_planned() -> None:
    ledger = {"ledger/sampled_tokens": 9.0, "ledger/trained_tokens": 7.0, "ledger/dropped_tokens/no_reward_spread": 2.0}
    closed = close_unused_ledger(ledger, "sampler_mismatch")
    assert closed == ledger | {"ledger/trained_tokens": 0.0, "ledger/dropped_tokens/sampler_mismatch": 7.0}


def test_answers_of_a_step_are_listed_once() -> None:
    found = plan(group(1.0, 0.0), group(1.0, 1.0, history=ONE_TURN))
    assert found.exchange_ids == ["e1", "e2"]


# -- errors --


@pytest.mark.parametrize(
    ("history", "found"),
    [
        (UNTRACKED, "2 choices without an exchange id"),
        (WireHistory(items=[USER, {"role": "assistant", "content": "a"}]), "2 messages of the assistant"),
    ],
)
@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, 1.0)])
def test_answers_that_are_no_recorded_choices_are_an_error(
    history: WireHistory, found: str, rewards: tuple[float, float]
) -> None:
    with pytest.raises(NothingTrainableError, match=f"{found}.*Append the `Choice` objects"):
        plan(group(*rewards, history=history))


@pytest.mark.parametrize("loss", [DppoConfig(), DpoConfig(), DISTILL])
@pytest.mark.parametrize("bad", [math.nan, 1e160, -1.7e308])
def test_rewards_must_be_finite_and_not_huge(loss: Any, bad: float) -> None:
    with pytest.raises(TrajectoryError, match=r"groups\[0\].trajectories\[1\] has reward"):
        plan(group(1.0, bad), loss=loss)
    assert plan(group(1.0, 1e29), loss=loss).samples


# -- trajectories that repeat --


def test_a_trajectory_that_is_submitted_twice_is_a_finding() -> None:
    found = plan([trajectory(1.0), trajectory(0.0, ONE_TURN)], [trajectory(0.0), trajectory(1.0, ONE_TURN)])
    assert found.metrics["data/step_num_trajectories_repeated"] == 2
    assert found.findings[-1].startswith("groups[1].trajectories[0], groups[1].trajectories[1]: the same recorded")


def test_forked_rollouts_that_share_answers_are_no_finding() -> None:
    found = plan([trajectory(1.0), trajectory(0.0, ONE_TURN), trajectory(0.5, BRANCHING)])
    assert "data/step_num_trajectories_repeated" not in found.metrics
    assert not [finding for finding in found.findings if "the same recorded" in finding]


# -- what the plan says about each rollout --


def plan_cut(*groups: WireGroup | list[WireTrajectory], **config: Any) -> StepPlan:
    exchanges = FIRST, SECOND, BRANCH, replace(LONG, finish_reason="length")
    return plan_step(resolved(*groups, exchanges=exchanges), TrainConfig(**config), step=3)


def rows(planned: StepPlan) -> list[tuple[int, int, float | None, int, dict[str, int]]]:
    return [
        (one.index, rollout.index, rollout.advantage, rollout.trained_tokens, rollout.dropped_tokens)
        for one in planned.groups
        for rollout in one.rollouts
    ]


def test_trained_and_dropped_rollouts_with_the_reasons_of_their_groups() -> None:
    planned = plan_cut(group(1.0, 0.0), group(0.3, 0.3), WireGroup(trajectories=[]), group(0.5))
    assert rows(planned) == [
        (0, 0, 0.5, 4, {}),
        (0, 1, -0.5, 4, {}),
        (1, 0, None, 0, {"no_reward_spread": 4}),
        (1, 1, None, 0, {"no_reward_spread": 4}),
        (3, 0, None, 0, {"no_reward_spread": 4}),
    ]
    assert [one.left_out for one in planned.groups] == [None, "equal_rewards", "single_rollout"]


def test_the_exchanges_of_each_branch_are_named() -> None:
    planned = plan_cut([trajectory(1.0, BRANCHING), trajectory(0.0, ONE_TURN)])
    assert [one.exchange_ids for one in planned.groups[0].rollouts] == [[["e1"], ["e3"]], [["e1"]]]


def test_a_truncated_rollout_is_told_from_its_trained_neighbours() -> None:
    planned = plan_cut([trajectory(1.0), trajectory(0.0), trajectory(0.5, LONG_TURN)], mask_truncated=True)
    assert [one.dropped_tokens for one in planned.groups[0].rollouts] == [{}, {}, {"truncated": 6}]


def test_the_advantage_of_a_rollout_is_the_mean_over_its_tokens() -> None:
    """Turn rewards 0, 2 and 1, 1 give tokens of 0.5, 0.5, 1.5, 1.5 and four of -0.5."""
    planned = plan_cut([trajectory(1.0, turn_rewards=[0, 2]), trajectory(0.0, turn_rewards=[1, 1])])
    assert [one.advantage for one in planned.groups[0].rollouts] == [1.0, -0.5]


def test_pairs_have_no_advantage_and_the_rest_is_dropped() -> None:
    planned = plan_cut(group(1.0, 0.5, 0.0), loss=DpoConfig())
    assert [(one.advantage, one.dropped_tokens) for one in planned.groups[0].rollouts] == [
        (None, {}),
        (None, {"no_preference_pair": 4}),
        (None, {}),
    ]


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.5), (0.2, 0.2)])
def test_the_rollouts_add_up_to_the_ledger(rewards: tuple[float, ...]) -> None:
    planned = plan_cut(
        group(*rewards), group(0.0, 1.0), [trajectory(0.1, LONG_TURN), trajectory(0.0)], mask_truncated=True
    )
    rollouts = [rollout for one in planned.groups for rollout in one.rollouts]
    assert sum(one.trained_tokens for one in rollouts) == planned.ledger["ledger/trained_tokens"]
    for name in ("no_reward_spread", "truncated"):
        total = sum(one.dropped_tokens.get(name, 0) for one in rollouts)
        assert total == planned.ledger.get(f"ledger/dropped_tokens/{name}", 0)


# -- metrics --


def metrics_of(*groups: WireGroup | list[WireTrajectory], **config: Any) -> dict[str, float]:
    found = plan_step(resolved(*groups), TrainConfig(**config), step=3)
    return found.metrics | found.ledger


def test_rewards_of_all_rollouts_are_described() -> None:
    metrics = metrics_of(group(1.0, 0.0, 0.5), group(2.0, 2.0))
    assert metrics["data/reward_mean"] == pytest.approx(5.5 / 5)
    assert (metrics["data/reward_min"], metrics["data/reward_p50"], metrics["data/reward_max"]) == (0, 1, 2)
    assert [metrics[f"data/reward_hist/{number}"] for number in range(10)] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 2]


def test_advantages_of_trained_rollouts_are_described_whatever_their_length_and_branches() -> None:
    mixed = [trajectory(1.0, ONE_TURN), trajectory(0.0, BRANCHING)]
    metrics = metrics_of(mixed, group(2.0, 2.0))
    assert (metrics["data/advantage_min"], metrics["data/advantage_max"]) == (-0.5, 0.5)
    assert metrics["data/advantage_mean"] == 0
    assert sum(metrics[f"data/advantage_hist/{number}"] for number in range(10)) == 2


def test_an_advantage_is_the_mean_of_its_tokens() -> None:
    turns = [trajectory(0.0, turn_rewards=[0.0, 1.0]), trajectory(0.0, turn_rewards=[0.0, 0.0])]
    samples = samples_of(plan_step(resolved(turns), TrainConfig(), step=3))
    means = [sum(sample.advantages) / sum(sample.loss_mask) for sample in samples]
    metrics = metrics_of(turns)
    assert (metrics["data/advantage_max"], metrics["data/advantage_min"]) == (max(means), min(means))
    assert max(means) > 0


@pytest.mark.parametrize("loss", [DpoConfig(), DistillConfig(teacher="p/teacher")])
def test_where_no_advantages_are_weighed_none_are_reported(loss: object) -> None:
    metrics = metrics_of(group(1.0, 0.0), loss=loss)
    assert "data/reward_mean" in metrics
    assert not any(name.startswith("data/advantage") for name in metrics)


def test_a_rollout_is_cut_off_if_any_answer_is() -> None:
    cut = replace(SECOND, finish_reason="length")
    [found] = resolved([trajectory(1.0), trajectory(0.0, ONE_TURN), trajectory(0.0, ONE_TURN)], exchanges=(FIRST, cut))
    assert describe_rollouts(found.trajectories)["data/step_truncated_share"] == pytest.approx(1 / 3)


def test_a_rollout_is_malformed_if_it_says_so_or_if_a_call_of_it_cannot_be_read() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    unread = {"role": "assistant", "content": '<tool_call>{"name": </tool_call>'}
    with_call = replace(FIRST, id="e5", message=unread, tools=tools)
    without_tools = replace(FIRST, id="e6", message=unread)
    rollouts = [
        trajectory(1.0, ONE_TURN),
        trajectory(0.0, ONE_TURN, policy_fault=True),
        *(trajectory(0.0, WireHistory(items=[USER, choice(name, str(unread["content"]))])) for name in ("e5", "e6")),
    ]
    [found] = resolved(rollouts, exchanges=(FIRST, with_call, without_tools))
    assert describe_rollouts(found.trajectories)["data/step_malformed_share"] == 2 / 4


def test_the_length_of_rollouts_is_counted_in_answers_and_in_tokens() -> None:
    [found] = resolved([trajectory(1.0), trajectory(0.0, ONE_TURN), trajectory(0.0, LONG_TURN)])
    metrics = describe_rollouts(found.trajectories)
    assert metrics["data/step_answers_per_rollout"] == pytest.approx(4 / 3)
    assert metrics["data/step_tokens_per_rollout"] == pytest.approx((4 + 2 + 6) / 3)


def test_every_metric_of_a_plan_is_in_the_catalogue() -> None:
    seen: set[str] = set()
    for changes in ({}, {"loss": DpoConfig()}, {"observation_weight": 0.1}):
        seen |= metrics_of(group(1.0, 0.0), group(0.3, 0.3), **changes).keys()
    assert [name for name in seen if find_metric(name, catalogue.PLAN_METRICS) is None] == []
    found = {
        key for key in catalogue.PLAN_METRICS for name in seen if find_metric(name, {key: catalogue.PLAN_METRICS[key]})
    }
    assert found == catalogue.PLAN_METRICS.keys()
