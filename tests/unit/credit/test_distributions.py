from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.config import DistillConfig, DpoConfig, TrainConfig
from art.credit.ledger import describe_rollouts
from art.credit.plan import plan_step
from art.metrics import catalogue
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from tests.support.metric_names import find_metric
from tests.support.recorded_exchanges import (
    BRANCHING,
    FIRST,
    LONG_TURN,
    ONE_TURN,
    SECOND,
    USER,
    choice,
    group,
    resolved,
    samples_of,
    trajectory,
)


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
    for changes in (
        {},
        {"loss": DpoConfig()},
        {"observation_weight": 0.1},
    ):
        seen |= metrics_of(group(1.0, 0.0), group(0.3, 0.3), **changes).keys()
    assert [name for name in seen if find_metric(name, catalogue.PLAN_METRICS) is None] == []
    found = {
        key for key in catalogue.PLAN_METRICS for name in seen if find_metric(name, {key: catalogue.PLAN_METRICS[key]})
    }
    assert found == catalogue.PLAN_METRICS.keys()
