from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from art.config import TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import exchange_ids
from art.credit.samples import PlannedAnswer, build_samples
from art.errors import TrajectoryError, TrajectoryMismatchError
from art.protocol.chat import conversation_digest, message_digest
from art.protocol.samples import ConstrainedSpan, Constraint
from art.protocol.training import WireAnswer, WireGroup, WireHistory
from art.trainer.tree.tree import check_sample
from tests.support.recorded_exchanges import (
    AGAIN,
    BRANCHING,
    FIRST,
    ONE_TURN,
    SECOND,
    TWO_TURNS,
    UNTRACKED,
    USER,
    Recorded,
    choice,
    group,
    resolved,
    samples_of,
    trajectory,
)


def test_turns_that_extend_one_another_become_one_path() -> None:
    (found,) = resolved([trajectory(1.0)])[0].trajectories
    (path,) = found.paths
    assert path.num_tokens == 8
    assert [(a.start, a.num_tokens, a.choice, a.exchange_id) for a in path.answers] == [
        (3, 2, 0, "e1"),
        (6, 2, 1, "e2"),
    ]
    assert (found.label, found.num_choices, found.sampled_tokens) == ("groups[0].trajectories[0]", 2, 4)


def test_a_branch_becomes_a_path_of_its_own() -> None:
    (found,) = resolved([trajectory(1.0, BRANCHING)])[0].trajectories
    assert [path.num_tokens for path in found.paths] == [5, 4]
    assert [path.answers[0].choice for path in found.paths] == [0, 1]


def test_answers_of_another_model_are_context() -> None:
    (found,) = resolved([trajectory(1.0)], exchanges=(FIRST, replace(SECOND, name="opponent")))[0].trajectories
    assert [path.num_tokens for path in found.paths] == [5]
    assert (found.context_tokens, found.num_choices) == (2, 2)


def test_a_turn_repeated_by_an_additional_history_counts_once() -> None:
    (found,) = resolved([trajectory(1.0, TWO_TURNS, ONE_TURN)])[0].trajectories
    assert (len(found.paths), found.sampled_tokens) == (1, 4)


def test_answers_of_further_histories_are_no_choices_of_the_first() -> None:
    (found,) = resolved([trajectory(1.0, ONE_TURN, TWO_TURNS)])[0].trajectories
    assert [answer.choice for path in found.paths for answer in path.answers] == [0, None]
    assert found.num_choices == 1


def test_other_temperatures_do_not_share_a_path() -> None:
    (found,) = resolved([trajectory(1.0)], exchanges=(FIRST, replace(SECOND, temperature=0.7)))[0].trajectories
    assert [path.answers[0].temperature for path in found.paths] == [1.0, 0.7]


def test_groups_without_trajectories_keep_the_numbers_of_the_others() -> None:
    assert [g.label for g in resolved(group(), group(1.0), group(), group(0.0))] == ["groups[1]", "groups[3]"]


def test_what_shapes_a_reward_is_counted() -> None:
    (found,) = resolved([trajectory(0.5, BRANCHING, UNTRACKED, turn_rewards=[1, 2])])[0].trajectories
    rewards = found.rewards()
    assert (rewards.reward, rewards.turn_rewards, rewards.choices) == (0.5, [1, 2], 2)
    assert found.untracked_choices == 1


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"turn_rewards": [1]}, r"groups\[0\]\.trajectories\[0\] has 1 turn_rewards for 2 choices"),
        ({"token_rewards": [[1, 1]]}, "has 1 token_rewards for 2 choices"),
        ({"token_rewards": [[1, 1], [1]]}, r"token_rewards\[1\] has 1 rewards, but that choice has 2 sampled tokens"),
    ],
)
def test_turn_and_token_rewards_must_fit(further: dict, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        resolved([trajectory(1.0, **further)])


def test_a_choice_made_elsewhere_has_no_token_rewards() -> None:
    resolved([trajectory(1.0, UNTRACKED, token_rewards=[[]])])
    with pytest.raises(TrajectoryError, match="that choice has no recorded tokens"):
        resolved([trajectory(1.0, UNTRACKED, token_rewards=[[1]])])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([USER, choice("e1", "changed")], "the answer was changed after sampling"),
        ([{"role": "user", "content": "other"}, choice("e1", "a")], "differs from what the model was sent"),
        ([USER, AGAIN, choice("e1", "a")], "2 messages come before this answer, but the model was sent 1"),
        ([USER, choice("gone", "a")], "is not recorded on this server"),
    ],
)
def test_changed_trajectories_are_refused(items: list[dict], message: str) -> None:
    with pytest.raises(TrajectoryMismatchError, match=message):
        resolved(group(1.0, 0.0, history=WireHistory(items=items)))


def named(*items: dict, **changes: Any) -> WireHistory:
    """The conversation as a client sends it without its texts."""
    digests, answers = [], []
    for item in items:
        digests.append(message_digest(item["choice"]["message"] if "choice" in item else item))
        if "choice" in item:
            exchange_id = item["choice"].get("exchange_id")
            answers.append(WireAnswer(exchange_id=exchange_id, digest=conversation_digest(digests)))
    return WireHistory(answers=answers, **changes)


@pytest.mark.parametrize("history", [ONE_TURN, TWO_TURNS, BRANCHING, UNTRACKED])
def test_a_conversation_without_its_texts_is_the_same(history: WireHistory) -> None:
    assert resolved(group(1.0, 0.0, history=named(*history.items))) == resolved(group(1.0, 0.0, history=history))
    assert exchange_ids([group(1.0, history=named(*history.items))]) == exchange_ids([group(1.0, history=history)])


def test_copies_of_answers_are_counted_without_their_texts() -> None:
    (found,) = resolved([trajectory(1.0, named(USER, choice("e1", "a"), num_copied_answers=2))])[0].trajectories
    assert found.copied_answers == 2


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([USER, choice("e1", "changed")], "the answer of exchange e1, or a message before it, was changed"),
        ([{"role": "user", "content": "other"}, choice("e1", "a")], "was changed after sampling"),
        ([USER, AGAIN, choice("e1", "a")], "was changed after sampling"),
        ([choice("e1", "a")], "was changed after sampling"),
        ([USER, choice("gone", "a")], "is not recorded on this server"),
    ],
)
def test_changes_are_noticed_without_the_texts(items: list[dict], message: str) -> None:
    with pytest.raises(TrajectoryMismatchError, match=message):
        resolved(group(1.0, 0.0, history=named(*items)))


def test_what_a_client_changes_without_harm_does_not_change_a_digest() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    sent = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None}
    kept = {"role": "assistant", "content": "", "tool_calls": [other]}
    assert message_digest(sent) == message_digest(kept)
    assert message_digest(kept) != message_digest(kept | {"content": "x"})
    assert conversation_digest([b"a" * 16, b"b" * 16]) != conversation_digest([b"b" * 16, b"a" * 16])


def test_a_conversation_has_one_form() -> None:
    with pytest.raises(ValidationError, match="either as `items` or as `answers`"):
        WireHistory(items=[USER], answers=[])
    assert WireHistory(items=[USER]).model_dump() == {"items": [USER], "tools": None}
    history = named(USER, choice("e1", "a"))
    assert WireHistory.model_validate_json(history.model_dump_json()) == history


@pytest.mark.parametrize(("changes", "message"), [({"temperature": 0.0}, "greedily"), ({"top_p": 0.9}, "top_p=0.9")])
def test_sampling_that_has_no_exact_gradient_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(TrajectoryMismatchError, match=message):
        resolved(group(1.0, 0.0), exchanges=(replace(FIRST, **changes), SECOND))


@pytest.mark.parametrize("constraint", [None, Constraint(grammar='start: "a"', stop_token_ids=[5])])
def test_top_p_without_the_tokens_that_it_kept_is_refused(constraint: Constraint | None) -> None:
    with pytest.raises(TrajectoryMismatchError, match=r"top_p=0.9, and the tokens that this kept are not recorded"):
        resolved(group(1.0, 0.0), exchanges=(replace(FIRST, top_p=0.9, constraint=constraint), SECOND))


def test_constraints_of_answers_become_spans_of_the_sample() -> None:
    kept = Constraint(kept=[[4, 9], [5]])
    grammar = Constraint(grammar="start: /.*/", stop_token_ids=[8])
    first, second = replace(FIRST, top_p=0.9, constraint=kept), replace(SECOND, constraint=grammar)
    plan = plan_step(resolved(group(1.0, 0.0), exchanges=(first, second)), TrainConfig(), step=3)
    sample = samples_of(plan, first, second)[0]
    assert sample.constraints == [
        ConstrainedSpan(start=3, num_tokens=2, constraint=kept),
        ConstrainedSpan(start=6, num_tokens=2, constraint=grammar),
    ]
    planned = plan.samples[0]
    (shortened,) = build_samples(
        [replace(planned, answers=[PlannedAnswer(exchange_id="e1", num_tokens=1, advantages=[1.0])])],
        Recorded(replace(first, sampling_logprobs=[-0.5])),  # type: ignore[arg-type]
    )
    assert shortened.constraints == [ConstrainedSpan(start=3, num_tokens=1, constraint=replace(kept, kept=[[4, 9]]))]


def test_the_tokens_of_a_path_know_the_step_that_sampled_them() -> None:
    """The first answer goes on with new weights after one token, the second is by the same weights again."""
    first = replace(FIRST, policy_version=1, segments=[(1, 1), (2, 1)])
    second = replace(SECOND, policy_version=2)
    sample = samples_of(
        plan_step(resolved(group(1.0, 0.0), exchanges=(first, second)), TrainConfig(), step=3), first, second
    )[0]
    assert (sample.policy_version, sample.versions) == (1, [(3, 1), (4, 2)])
    path = check_sample(sample, vocab_size=100)
    assert path is not None
    assert path.policy_versions.tolist() == [1, 2, 2, 2]
    whole = replace(first, policy_version=2, segments=[])
    (same, *_) = samples_of(
        plan_step(resolved(group(1.0, 0.0), exchanges=(whole, second)), TrainConfig(), step=3), whole, second
    )
    assert (same.policy_version, same.versions) == (2, [])


def test_exchange_ids_once_each() -> None:
    assert exchange_ids([group(1.0, 0.0), group(1.0), WireGroup(trajectories=[])]) == ["e1", "e2"]
