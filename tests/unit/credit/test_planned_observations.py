"""What the environment answered in a rollout, planned as samples of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.config import DistillConfig, DpoConfig, TrainConfig
from art.credit.ledger import close_ledger
from art.credit.plan import StepPlan, plan_step
from art.credit.samples import build_samples
from art.errors import ConfigError, TrainingError
from art.gateway.record.recorder import Exchange
from art.protocol.samples import TrainingSample
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from tests.support.recorded_exchanges import (
    AGAIN,
    BRANCH,
    BRANCHING,
    FIRST,
    LONG,
    ONE_TURN,
    SECOND,
    TWO_TURNS,
    USER,
    Recorded,
    answer,
    choice,
    exchange,
    group,
    resolved,
    trajectory,
)

TOOL = {"role": "tool", "content": "42", "tool_call_id": "t"}
_TALK = [USER, answer("a"), AGAIN, answer("b"), TOOL]
THIRD = exchange("e5", [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9], [5], messages=_TALK, text="c")
OTHER_THIRD = replace(THIRD, id="e6", completion_token_ids=[6], message=answer("d"))
THREE_TURNS = WireHistory(items=[*TWO_TURNS.items, TOOL, choice("e5", "c")])
SAME_BUT_THE_END = WireHistory(items=[*TWO_TURNS.items, TOOL, choice("e6", "d")])
ALL = (FIRST, SECOND, BRANCH, LONG, THIRD, OTHER_THIRD)


def plan(*groups: WireGroup | list[WireTrajectory], exchanges: tuple[Exchange, ...] = ALL, **config: Any) -> StepPlan:
    config = {"observation_weight": 0.05} | config
    return plan_step(resolved(*groups, exchanges=exchanges), TrainConfig(**config), step=3)


def built(planned: StepPlan, exchanges: tuple[Exchange, ...] = ALL) -> list[TrainingSample]:
    return build_samples([*planned.samples, *planned.observations], Recorded(*exchanges))  # type: ignore[arg-type]


def learnt(sample: TrainingSample) -> list[int]:
    return [token for token, is_learnt in zip(sample.token_ids, sample.loss_mask, strict=True) if is_learnt]


def test_what_the_environment_says_between_two_answers_is_learnt() -> None:
    planned = plan([trajectory(1.0, THREE_TURNS), trajectory(0.0, ONE_TURN)])
    (sample,) = [sample for sample in built(planned) if sample.component == "observation"]
    assert list(sample.token_ids) == THIRD.prompt_token_ids
    assert learnt(sample) == [6, 9, 9, 9], "not the first prompt, and no answer"
    assert (sample.weight, sample.share) == (0.05, 4), "0.05 times the mean over its tokens"
    assert (sample.sample_id, sample.rollout_id, sample.group_id) == (
        "groups[0].trajectories[0].paths[0].observations",
        "groups[0].trajectories[0]",
        "groups[0]",
    )
    assert sample.temperature == 1.0


def test_observations_share_the_tokens_of_the_answers_layout() -> None:
    samples = built(plan([trajectory(1.0, THREE_TURNS), trajectory(0.0, THREE_TURNS)]))
    assert len({id(sample.token_ids.layout) for sample in samples}) == 1  # type: ignore[attr-defined]
    assert len(samples[0].token_ids.layout.tokens) == len(THIRD.prompt_token_ids)  # type: ignore[attr-defined]


def test_branches_of_a_rollout_count_a_shared_observation_once() -> None:
    planned = plan([trajectory(1.0, THREE_TURNS, SAME_BUT_THE_END), trajectory(0.0, ONE_TURN)])
    assert len(planned.samples) == 3
    assert planned.ledger["ledger/observed_tokens"] == 4
    each = plan([trajectory(1.0, THREE_TURNS), trajectory(0.0, SAME_BUT_THE_END)])
    assert each.ledger["ledger/observed_tokens"] == 8, "two rollouts have seen it"


def test_a_message_of_another_assistant_is_no_observation() -> None:
    by_hand = replace(SECOND, request_messages=[USER, answer("a"), answer("by hand")])
    turns = WireHistory(items=[USER, choice("e1", "a"), answer("by hand"), choice("e2", "b")])
    found = plan([trajectory(1.0, turns), trajectory(0.0, ONE_TURN)], exchanges=(FIRST, by_hand))
    assert found.observations == []
    assert "there was no observation to learn" in found.findings[-1]
    of_another_model = plan(
        [trajectory(1.0, THREE_TURNS), trajectory(0.0)], exchanges=(FIRST, replace(SECOND, name="opponent"), THIRD)
    )
    assert of_another_model.observations == []


def test_a_rewritten_history_has_no_observation_that_is_known_by_its_tokens() -> None:
    assert plan([trajectory(1.0, BRANCHING), trajectory(0.0, ONE_TURN)]).observations == []


def test_groups_without_spread_have_observations_too() -> None:
    planned = plan(group(1.0, 1.0))
    assert planned.samples == []
    assert [sample.component for sample in built(planned)] == ["observation"] * 2
    assert planned.findings[:-1] == ["groups[0]: all rewards are equal, nothing to learn"]
    assert planned.exchange_ids == ["e2"], "kept until the job has ended"
    assert planned.ledger["ledger/dropped_tokens/no_reward_spread"] == planned.ledger["ledger/sampled_tokens"] == 8


def test_rollouts_that_are_left_out_for_their_length_teach_nothing_at_all() -> None:
    cut = replace(SECOND, finish_reason="length")
    planned = plan(group(1.0, 0.0), exchanges=(FIRST, cut), mask_truncated=True)
    assert (planned.samples, planned.observations) == ([], [])


def test_without_the_setting_there_are_none() -> None:
    planned = plan(group(1.0, 0.0), observation_weight=0.0)
    assert planned.observations == []
    assert "ledger/observed_tokens" not in planned.ledger


def test_the_ledger_counts_them_beside_what_was_sampled() -> None:
    planned = plan(group(1.0, 0.0))
    trained = {
        "data/step_trainable_tokens": 8.0 + 2 + 30,
        "data/step_observation_tokens": 2.0,
        "data/step_sft_tokens": 30.0,
    }
    closed = close_ledger(planned.ledger, trained)
    assert (closed["ledger/trained_tokens"], closed["ledger/observed_tokens"]) == (8, 2)
    with pytest.raises(TrainingError, match="2 tokens of observations were planned, 1 were trained"):
        close_ledger(
            planned.ledger, trained | {"data/step_observation_tokens": 1.0, "data/step_trainable_tokens": 39.0}
        )


def test_a_teacher_is_not_asked_about_them() -> None:
    planned = plan(group(1.0, 0.0), loss=DistillConfig(teacher="p/teacher"))
    assert all(sample.observed is None for sample in planned.samples)
    assert len(planned.observations) == 2


def test_dpo_takes_none() -> None:
    with pytest.raises(ConfigError, match="`observation_weight` does not apply"):
        TrainConfig(loss=DpoConfig(), observation_weight=0.1)
