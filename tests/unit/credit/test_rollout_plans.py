"""What the plan of a step says about each submitted rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.config import DpoConfig, TrainConfig
from art.credit.plan import StepPlan, plan_step
from art.protocol.training import WireGroup, WireTrajectory
from tests.support.recorded_exchanges import (
    BRANCH,
    BRANCHING,
    FIRST,
    LONG,
    LONG_TURN,
    ONE_TURN,
    SECOND,
    group,
    resolved,
    trajectory,
)


def plan(*groups: WireGroup | list[WireTrajectory], **config: Any) -> StepPlan:
    exchanges = FIRST, SECOND, BRANCH, replace(LONG, finish_reason="length")
    return plan_step(resolved(*groups, exchanges=exchanges), TrainConfig(**config), step=3)


def rows(planned: StepPlan) -> list[tuple[int, int, float | None, int, dict[str, int]]]:
    return [
        (one.index, rollout.index, rollout.advantage, rollout.trained_tokens, rollout.dropped_tokens)
        for one in planned.groups
        for rollout in one.rollouts
    ]


def test_trained_and_dropped_rollouts_with_the_reasons_of_their_groups() -> None:
    planned = plan(group(1.0, 0.0), group(0.3, 0.3), WireGroup(trajectories=[]), group(0.5))
    assert rows(planned) == [
        (0, 0, 0.5, 4, {}),
        (0, 1, -0.5, 4, {}),
        (1, 0, None, 0, {"no_reward_spread": 4}),
        (1, 1, None, 0, {"no_reward_spread": 4}),
        (3, 0, None, 0, {"no_reward_spread": 4}),
    ]
    assert [one.left_out for one in planned.groups] == [None, "equal_rewards", "single_rollout"]


def test_the_exchanges_of_each_branch_are_named() -> None:
    planned = plan([trajectory(1.0, BRANCHING), trajectory(0.0, ONE_TURN)])
    assert [one.exchange_ids for one in planned.groups[0].rollouts] == [[["e1"], ["e3"]], [["e1"]]]


def test_a_truncated_rollout_is_told_from_its_trained_neighbours() -> None:
    planned = plan([trajectory(1.0), trajectory(0.0), trajectory(0.5, LONG_TURN)], mask_truncated=True)
    assert [one.dropped_tokens for one in planned.groups[0].rollouts] == [{}, {}, {"truncated": 6}]


def test_the_advantage_of_a_rollout_is_the_mean_over_its_tokens() -> None:
    """Turn rewards 0, 2 and 1, 1 give tokens of 0.5, 0.5, 1.5, 1.5 and four of -0.5."""
    planned = plan([trajectory(1.0, turn_rewards=[0, 2]), trajectory(0.0, turn_rewards=[1, 1])])
    assert [one.advantage for one in planned.groups[0].rollouts] == [1.0, -0.5]


def test_pairs_have_no_advantage_and_the_rest_is_dropped() -> None:
    planned = plan(group(1.0, 0.5, 0.0), loss=DpoConfig(pairs="best_worst"))
    assert [(one.advantage, one.dropped_tokens) for one in planned.groups[0].rollouts] == [
        (None, {}),
        (None, {"no_preference_pair": 4}),
        (None, {}),
    ]


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.5), (0.2, 0.2)])
def test_the_rollouts_add_up_to_the_ledger(rewards: tuple[float, ...]) -> None:
    planned = plan(group(*rewards), group(0.0, 1.0), [trajectory(0.1, LONG_TURN), trajectory(0.0)], mask_truncated=True)
    rollouts = [rollout for one in planned.groups for rollout in one.rollouts]
    assert sum(one.trained_tokens for one in rollouts) == planned.ledger["ledger/trained_tokens"]
    for name in ("no_reward_spread", "truncated"):
        total = sum(one.dropped_tokens.get(name, 0) for one in rollouts)
        assert total == planned.ledger.get(f"ledger/dropped_tokens/{name}", 0)
