from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from art.config import DistillConfig, DpoConfig, TrainConfig
from art.credit.ledger import close_ledger
from art.credit.plan import StepPlan, plan_step
from art.credit.resolve import exchange_ids
from art.credit.samples import PlannedAnswer, ask_teacher, build_samples
from art.credit.sft import sft_paths, sft_samples
from art.engine import EngineInfo
from art.errors import ConfigError, NothingTrainableError, TrainingError, TrajectoryError, TrajectoryMismatchError
from art.gateway.policies import PolicyRef
from art.gateway.renderer import Renderer, load_renderer
from art.protocol.chat import conversation_digest, message_digest, normalize_messages
from art.protocol.samples import ConstrainedSpan, Constraint, TrainingSample
from art.protocol.training import WireAnswer, WireGroup, WireHistory, WireTrajectory
from art.record.recorder import Exchange
from art.trainer.tree import check_sample
from tests.support.gateway import system, user
from tests.support.recorded_exchanges import (
    AGAIN,
    BRANCH,
    BRANCHING,
    FIRST,
    LONG,
    ONE_TURN,
    SECOND,
    TWO_TURNS,
    UNTRACKED,
    USER,
    Recorded,
    answer,
    choice,
    exchange,
    group,
    resolved,
    samples_of,
    trajectory,
)


def test_turns_that_extend_one_another_become_one_path() -> None:
    (found,) = resolved([trajectory(1.0)])[0].trajectories
    (path,) = found.paths
    assert [(a.start, a.num_tokens, a.choice, a.exchange_id) for a in path.answers] == [
        (3, 2, 0, "e1"),
        (6, 2, 1, "e2"),
    ]
    assert (found.label, found.num_choices, found.sampled_tokens) == ("groups[0].trajectories[0]", 2, 4)


def test_a_branch_becomes_a_path_of_its_own() -> None:
    (found,) = resolved([trajectory(1.0, BRANCHING)])[0].trajectories
    assert [path.answers[-1].start + path.answers[-1].num_tokens for path in found.paths] == [5, 4]
    assert [path.answers[0].choice for path in found.paths] == [0, 1]


def test_answers_of_another_model_are_context() -> None:
    (found,) = resolved([trajectory(1.0)], exchanges=(FIRST, replace(SECOND, name="opponent")))[0].trajectories
    assert [(path.answers[-1].start, path.answers[-1].num_tokens) for path in found.paths] == [(3, 2)]
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
    assert (found.reward, found.turn_rewards, found.num_choices) == (0.5, [1, 2], 2)
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
    assert WireHistory(items=[USER]).items == [USER]
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


# -- observations --


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


# -- teachers and other checkpoints --


class ScoringEngine:
    async def info(self) -> EngineInfo:
        return EngineInfo(vocab_size=9, max_context=8, dtype="float32", device="cpu")

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


def sample(**changes: Any) -> TrainingSample:
    return TrainingSample(
        sample_id="groups[0]",
        rollout_id="r",
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        sampling_logprobs=[0.0, -1.0, -1.0],
        advantages=[0.0, 1.0, 1.0],
        **changes,
    )


async def ask(asked: TrainingSample) -> list[list[float]]:
    engine: Any = ScoringEngine()
    renderer: Any = None
    teacher = PolicyRef(
        project="p", name="teacher", policy_version=0, adapter=None, engine=engine, renderer=renderer, max_context=8
    )
    return await ask_teacher(teacher, engine, [asked])


async def test_a_teacher_answers_for_every_learnt_token() -> None:
    assert await ask(sample()) == [[-1.0, -1.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, "temperature 0.7; distillation compares"),
        (
            {"constraints": [ConstrainedSpan(start=1, num_tokens=2, constraint=Constraint(kept=[[2], [3]]))]},
            r"groups\[0\] has an answer that was drawn from a part of the vocabulary .*without constraints",
        ),
    ],
    ids=["temperature", "constraint"],
)
async def test_other_samples_cannot_be_compared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        await ask(sample(**changes))


# -- supervised fine-tuning --


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> Renderer:
    return load_renderer(tokenizer_dir)


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def talk(num_turns: int) -> list[dict[str, Any]]:
    turns = [[user(f"hello {i}"), said(f"the answer {i}")] for i in range(num_turns)]
    return [system("be brief"), *(message for turn in turns for message in turn)]


def conversations(*items: list[dict[str, Any]]) -> WireTrajectory:
    return WireTrajectory(histories=[WireHistory(items=one) for one in items])


def expected(items: list[dict[str, Any]], renderer: Renderer) -> set[tuple[tuple[int, ...], int]]:
    """Each learnt token with everything before it, from one rendering per assistant message."""
    messages = normalize_messages(items)
    learnt = set()
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > 0:
            prompt = renderer.render(messages[:i], None)
            completion = renderer.completion(messages[: i + 1], None) or []
            whole = prompt + completion
            learnt |= {(tuple(whole[:k]), whole[k]) for k in range(len(prompt), len(whole))}
    return learnt


def learnt_of(samples: list[Any]) -> list[tuple[tuple[int, ...], int]]:
    return [
        (tuple(sample.token_ids[:k]), sample.token_ids[k])
        for sample in samples
        for k, is_learnt in enumerate(sample.loss_mask)
        if is_learnt
    ]


def test_the_answers_of_a_conversation_share_one_sample(renderer: Renderer) -> None:
    items = talk(40)
    paths, metrics = sft_paths([conversations(items)], renderer)
    (sample,) = sft_samples(paths)
    learnt = learnt_of([sample])
    assert set(learnt) == expected(items, renderer)
    assert len(learnt) == len(set(learnt)), "each token is learnt once"
    assert len(sample.token_ids) < 1.1 * len(renderer.render(normalize_messages(items), None))
    assert len(sample.loss_mask) == len(sample.advantages) == len(sample.sampling_logprobs) == len(sample.token_ids)
    assert metrics["ledger/retokenised_messages"] == 40


def test_an_answer_whose_prompt_is_rewritten_begins_another_sample(renderer: Renderer) -> None:
    """The template drops the reasoning of earlier turns, so the later prompt is not what the first answer ended with."""
    items = [user("a"), said("b", reasoning_content="hmm"), user("c"), said("d"), user("e"), said("f")]
    paths, metrics = sft_paths([conversations(items, talk(2))], renderer)
    samples = sft_samples(paths)
    learnt = learnt_of(samples)
    assert set(learnt) == expected(items, renderer) | expected(talk(2), renderer)
    assert len(learnt) == len(set(learnt))
    assert [sample.sample_id for sample in samples] == [
        "trajectories[0].histories[0].messages[1]",
        "trajectories[0].histories[0].messages[3]",
        "trajectories[0].histories[1].messages[2]",
    ]
    assert {sample.rollout_id for sample in samples} == {"trajectories[0]"}
    assert metrics["ledger/retokenised_messages"] == 5


def test_without_an_answer_there_is_nothing_to_learn(renderer: Renderer) -> None:
    with pytest.raises(NothingTrainableError):
        sft_paths([conversations([said("first")])], renderer)
