from __future__ import annotations

import math
from dataclasses import replace

import pytest

from art.config import TrainConfig
from art.errors import NothingTrainableError, TrainingError, TrajectoryError, TrajectoryMismatchError
from art.gateway.recorder import Exchange
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from art.runtime.plan import close_ledger, plan_step
from art.runtime.samples import exchange_ids, resolve

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "again"}


def exchange(
    id: str, prompt: list[int], completion: list[int], *, messages: list[dict], text: str, **changes: object
) -> Exchange:
    base = Exchange(
        id=id, rollout_id=None, project="p", name="m", policy_version=3, parent_id=None, branch_reason=None,
        prompt_token_ids=prompt, completion_token_ids=completion, sampling_logprobs=[-0.5] * len(completion), temperature=1.0,
        top_p=1.0, seed=1, finish_reason="stop", message={"role": "assistant", "content": text}, request_messages=messages,
        tools=None, created_at=0.0,
    )  # fmt: skip
    return replace(base, **changes)


def choice(exchange_id: str | None, text: str) -> dict:
    item = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": text}}
    return {"choice": item | ({"exchange_id": exchange_id} if exchange_id else {})}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


FIRST = exchange("e1", [1, 2, 3], [4, 5], messages=[USER], text="a")
SECOND = exchange("e2", [1, 2, 3, 4, 5, 6], [7, 8], messages=[USER, answer("a"), AGAIN], text="b", policy_version=2)
BRANCH = exchange("e3", [1, 9, 6], [7], messages=[USER, answer("a"), AGAIN], text="b")
TWO_TURNS = WireHistory(items=[USER, choice("e1", "a"), AGAIN, choice("e2", "b")])


def group(*rewards: float, history: WireHistory = TWO_TURNS) -> WireGroup:
    return WireGroup(trajectories=[WireTrajectory(reward=reward, histories=[history]) for reward in rewards])


def resolved(*groups: WireGroup, exchanges: tuple[Exchange, ...] = (FIRST, SECOND, BRANCH)) -> list:
    return resolve(list(groups), {e.id: e for e in exchanges}, project="p", name="m")


def test_turns_that_extend_one_another_become_one_sample() -> None:
    plan = plan_step(resolved(group(1.0, 0.0)), TrainConfig(), step=4)
    assert len(plan.samples) == 2
    sample = plan.samples[0]
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.loss_mask == [False, False, False, True, True, False, True, True]
    assert sample.sampling_logprobs == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert sample.advantages == [0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert sample.policy_version == 2
    assert plan.metrics["offpolicy/max_staleness"] == 2


def test_a_branch_becomes_a_sample_of_its_own() -> None:
    history = WireHistory(items=[USER, choice("e1", "a"), AGAIN, choice("e3", "b")])
    plan = plan_step(resolved(group(1.0, 0.0, history=history)), TrainConfig(), step=3)
    paths = [sample.token_ids for sample in plan.samples if sample.rollout_id.endswith("trajectories[0]")]
    assert paths == [[1, 2, 3, 4, 5], [1, 9, 6, 7]]


def test_ledger_closes_and_names_what_was_dropped() -> None:
    plan = plan_step(resolved(group(1.0, 0.0), group(0.3, 0.3, 0.3)), TrainConfig(), step=3)
    assert plan.ledger == {
        "ledger/sampled_tokens": 20,
        "ledger/trained_tokens": 8,
        "ledger/context_tokens": 0,
        "ledger/untracked_choices": 0,
        "ledger/dropped_tokens/no_reward_spread": 12,
    }
    assert plan.metrics["data/step_num_groups_trainable"] == 1
    assert plan.findings == ["groups[1]: all rewards are equal, nothing to learn"]


def test_answers_of_another_model_are_context() -> None:
    other = replace(SECOND, name="opponent")
    plan = plan_step(resolved(group(1.0, 0.0), exchanges=(FIRST, other)), TrainConfig(), step=3)
    assert plan.samples[0].token_ids == [1, 2, 3, 4, 5]
    assert plan.ledger["ledger/context_tokens"] == 4


def test_a_turn_repeated_by_an_additional_history_is_trained_once() -> None:
    repeated = WireHistory(items=[USER, choice("e1", "a")])
    groups = [
        WireGroup(trajectories=[WireTrajectory(reward=r, histories=[TWO_TURNS, repeated]) for r in (0.0, 1.0)]),
    ]
    plan = plan_step(resolved(*groups), TrainConfig(), step=3)
    assert plan.ledger["ledger/sampled_tokens"] == 8


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([USER, choice("e1", "changed")], "the answer was changed after sampling"),
        ([{"role": "user", "content": "other"}, choice("e1", "a")], "differs from what the model was sent"),
        ([USER, AGAIN, choice("e1", "a")], "2 messages stand before this answer, but the model was sent 1"),
        ([USER, choice("gone", "a")], "is not recorded on this server"),
    ],
)
def test_changed_trajectories_are_refused(items: list[dict], message: str) -> None:
    with pytest.raises(TrajectoryMismatchError, match=message):
        resolved(group(1.0, 0.0, history=WireHistory(items=items)))


@pytest.mark.parametrize(("changes", "message"), [({"temperature": 0.0}, "greedily"), ({"top_p": 0.9}, "top_p=0.9")])
def test_sampling_that_has_no_exact_gradient_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(TrajectoryMismatchError, match=message):
        resolved(group(1.0, 0.0), exchanges=(replace(FIRST, **changes), SECOND))


def test_other_temperatures_do_not_share_a_sample() -> None:
    plan = plan_step(
        resolved(group(1.0, 0.0), exchanges=(FIRST, replace(SECOND, temperature=0.7))), TrainConfig(), step=3
    )
    assert {sample.temperature for sample in plan.samples} == {1.0, 0.7}
    assert len(plan.samples) == 4


def test_no_spread_and_no_choices_are_told_apart() -> None:
    with pytest.raises(NothingTrainableError, match="equal rewards"):
        plan_step(resolved(group(1.0, 1.0)), TrainConfig(), step=3)
    untracked = WireHistory(items=[USER, choice(None, "a")])
    with pytest.raises(NothingTrainableError, match="2 choices without an exchange id"):
        plan_step(resolved(group(1.0, 0.0, history=untracked)), TrainConfig(), step=3)


def test_rewards_must_be_finite() -> None:
    with pytest.raises(TrajectoryError, match=r"groups\[0\].trajectories\[1\]"):
        plan_step(resolved(group(1.0, math.nan)), TrainConfig(), step=3)


def test_exchange_ids_once_each() -> None:
    assert exchange_ids([group(1.0, 0.0), group(1.0)]) == ["e1", "e2"]


def test_the_ledger_is_closed_with_what_the_trainer_left_out() -> None:
    ledger = plan_step(resolved(group(1.0, 0.0)), TrainConfig(), step=3).ledger
    trained = {"data/step_trainable_tokens": 8.0, "offpolicy/mismatch_masked_tokens": 4.0}
    closed = close_ledger(ledger, trained)
    assert closed["ledger/trained_tokens"] == 4
    assert closed["ledger/dropped_tokens/sampler_mismatch"] == 4
    assert close_ledger(ledger, trained | {"offpolicy/mismatch_masked_tokens": 0.0}) == ledger
    with pytest.raises(TrainingError, match="8 tokens were planned, 7 were trained"):
        close_ledger(ledger, {"data/step_trainable_tokens": 7.0})
