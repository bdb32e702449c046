"""What is said of the tokens of a rollout, from records that the test writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art.errors import NotFoundError
from art.storage.layout import ModelPaths
from art.storage.step_files import (
    GroupPlan,
    PlanRecord,
    RecordedSample,
    RolloutPlan,
    StepTokens,
    TokenReason,
    remove_old_token_files,
    write_plan,
    write_token_file,
)
from art_page.rollout_answers import MAX_TOKENS, RolloutTokens, TokensQuery
from art_page.token_paths import ExchangePath, join_paths
from art_page.tokens import RolloutTraining, describe_tokens, find_training
from tests.support.recorded_exchanges import AGAIN, BRANCH, FIRST, SECOND, USER, exchange, recorded_answer

LABEL = "groups[0].trajectories[0]"
MODEL = ("p", "m")
REASONS = [TokenReason.TRAINED, TokenReason.CLIPPED, TokenReason.MISMATCHED_TOKEN, TokenReason.TRAINED]
RECORDED = {one.id: recorded_answer(one) for one in (FIRST, SECOND, BRANCH)}


@pytest.fixture
def paths(tmp_path: Path) -> ModelPaths:
    return ModelPaths(tmp_path)


def train(paths: ModelPaths, **changes: Any) -> RolloutPlan:
    """Write what step 4 did with the rollout of exchanges e1 and e2, whose tokens are 1 2 3 [4 5] 6 [7 8]."""
    rollout = RolloutPlan(
        index=0, label=LABEL, reward=1.0, advantage=0.5, exchange_ids=[["e1", "e2"], ["e3"]], trained_tokens=5
    ).model_copy(update=changes)
    plan = PlanRecord(
        job_id="job-00000001", kind="train", created_at=1.0, from_step=3, step=4, trained=True, ledger={},
        has_token_file=True, groups=[GroupPlan(index=0, rollouts=[rollout])],
    )  # fmt: skip
    write_plan(paths.step(4), plan)
    return rollout


def write_tokens(paths: ModelPaths, job_id: str = "job-00000001") -> None:
    sample = RecordedSample(
        sample_id=f"{LABEL}.paths[0]", rollout_id=LABEL, group_id="groups[0]", component="rl", num_inputs=7, shared=0,
        spans=[[3, 5], [6, 8]], weight=1.0, scale=0.25, temperature=1.0, policy_version=2, update=1, micro_batch=0,
        advantages=[[0.5, 4]],
    )  # fmt: skip
    columns = {
        "policy_logprobs": np.asarray([-0.25, -0.5, -1.0, -2.0], dtype=np.float16),
        "log_ratios": np.asarray([0.25, 0.0, -0.5, -1.5], dtype=np.float16),
        "entropy": np.asarray([1.0, 0.5, 0.25, 0.0], dtype=np.float16),
        "reasons": np.asarray(REASONS, dtype=np.uint8),
    }
    write_token_file(paths.step(4), StepTokens(job_id=job_id, from_step=3, samples=[sample], columns=columns))


def describe(rollout_paths: list[ExchangePath], training: RolloutTraining | None, **query: int) -> RolloutTokens:
    return describe_tokens(rollout_paths, training, None, TokensQuery(**query), model=MODEL)


def both_paths() -> list[ExchangePath]:
    return join_paths([["e1", "e2", "e3"]], RECORDED)


def test_tokens_values_and_reasons_of_a_trained_path(paths: ModelPaths) -> None:
    train(paths)
    write_tokens(paths)
    answer = describe(both_paths(), find_training(paths, 4, ["e1", "e2", "e3"]))
    assert answer.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(s.start, s.end, s.role, s.sampled, s.trained, s.reason) for s in answer.spans] == [
        (0, 3, "prompt", False, False, "prompt"),
        (3, 4, "policy", True, True, "trained"),
        (4, 5, "policy", True, False, "not learnt: beyond the bound of the loss"),
        (5, 6, "user", False, False, "user message"),
        (6, 7, "policy", True, False, "masked: off-policy token"),
        (7, 8, "policy", True, True, "trained"),
    ]
    assert [s.policy_version for s in answer.spans if s.sampled] == [3, 3, 2, 2]
    assert answer.values["policy_logprob"] == [None, None, None, -0.25, -0.5, None, -1.0, -2.0]
    assert answer.values["sampling_logprob"] == [None, None, None, -0.5, -0.5, None, -0.5, -0.5]  # of the record
    assert answer.values["importance_ratio"][3] == pytest.approx(np.exp(0.25))
    assert answer.values["advantage"][3:] == [0.5, 0.5, None, 0.5, 0.5]
    assert answer.values["weight"][3] == 0.25
    assert (answer.step, answer.update) == (4, 1)
    assert [(p.label, p.num_tokens, p.num_sampled, p.num_trained) for p in answer.paths] == [
        ("main conversation", 8, 4, 2),
        ("main conversation, branch 1", 4, 1, 1),
    ]
    assert answer.texts == [None] * 8
    assert "The tokenizer of the base model is not on this machine" in (answer.missing or "")


def test_an_answer_over_two_steps_is_shown_with_both(paths: ModelPaths) -> None:
    train(paths)
    write_tokens(paths)
    switched = RECORDED | {"e1": replace(RECORDED["e1"], policy_version=1, segments=[(1, 1), (2, 1)])}
    for training in (find_training(paths, 4, ["e1", "e2", "e3"]), None):
        answer = describe(join_paths([["e1", "e2", "e3"]], switched), training)
        spans = [(s.start, s.end, s.policy_version) for s in answer.spans if s.exchange_id == "e1"]
        assert spans == [(3, 4, 1), (4, 5, 2)]


def test_another_path_and_a_part_of_one(paths: ModelPaths) -> None:
    train(paths)
    training = find_training(paths, 4, ["e1"])
    assert describe(both_paths(), training, path=1).token_ids == [1, 9, 6, 7]
    part = describe(both_paths(), training, first=4, last=7)
    assert (part.first, part.token_ids, [s.start for s in part.spans]) == (4, [5, 6, 7], [3, 5, 6])
    assert len(part.values["sampling_logprob"]) == 3
    assert describe(both_paths(), training, first=99).token_ids == []
    with pytest.raises(NotFoundError, match="has 2 token paths; there is no path 2"):
        describe(both_paths(), training, path=2)


def test_no_more_tokens_than_the_page_can_show() -> None:
    long = exchange("long", list(range(MAX_TOKENS + 10)), [1], messages=[USER], text="x")
    answer = describe(join_paths([["long"]], {"long": recorded_answer(long)}), None, first=5)
    assert (answer.first, len(answer.token_ids), answer.paths[0].num_tokens) == (5, MAX_TOKENS, MAX_TOKENS + 11)


def test_when_the_record_is_gone_the_step_is_left(paths: ModelPaths) -> None:
    train(paths)
    write_tokens(paths)
    answer = describe([], find_training(paths, 4, ["e1", "e2"]))
    assert (answer.step, answer.paths, answer.token_ids) == (4, [], [])


def test_a_token_file_of_another_job_is_not_taken_for_this_one(paths: ModelPaths) -> None:
    train(paths)
    write_tokens(paths, job_id="job-99999999")
    answer = describe(both_paths(), find_training(paths, 4, ["e1"]))
    assert set(answer.values) == {"sampling_logprob", "advantage"}
    assert {s.reason for s in answer.spans if s.sampled} == {
        "trained; which of its tokens were masked is not known any more"
    }


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [("no_reward_spread", "dropped: no spread of rewards in the group"), ("of_tomorrow", "dropped: of tomorrow")],
)
def test_a_rollout_that_was_left_out_says_why(paths: ModelPaths, dropped: str, reason: str) -> None:
    train(paths, trained_tokens=0, dropped_tokens={dropped: 5})
    answer = describe(both_paths(), find_training(paths, 4, ["e1"]))
    assert {(s.reason, s.trained) for s in answer.spans if s.sampled} == {(reason, False)}


def test_a_rollout_is_found_in_the_steps_beside_the_one_it_was_logged_in(paths: ModelPaths) -> None:
    train(paths)
    assert [find_training(paths, step, ["e2"]) is not None for step in (2, 3, 4, 5, 6)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert find_training(paths, 4, ["of another"]) is None


def test_tokens_of_other_models_and_of_no_record(paths: ModelPaths) -> None:
    helper = exchange("h", [1, 2], [3], messages=[USER], text="x", name="helper")
    answer = describe(join_paths([["h"]], {"h": recorded_answer(helper)}), None)
    assert [(s.role, s.reason) for s in answer.spans] == [
        ("prompt", "prompt"),
        ("context", "context: not sampled by this model"),
    ]
    nothing = describe([], None)
    assert (nothing.paths, nothing.missing) == ([], "No token of this rollout is recorded here.")


def test_conversations_become_paths_as_in_training() -> None:
    assistant = {"role": "assistant", "content": "b"}
    tool = {"role": "tool", "content": "3", "tool_call_id": "c"}
    third = exchange(
        "e5", [1, 2, 3, 4, 5, 6, 7, 8, 2], [9], messages=[*SECOND.request_messages, assistant, tool], text="c"
    )
    warm = exchange("e6", [1, 2, 3, 4, 5, 6], [7], messages=[USER, {"role": "assistant", "content": "a"}, AGAIN],
                    text="b", temperature=0.5)  # fmt: skip
    recorded = RECORDED | {one.id: recorded_answer(one) for one in (third, warm)}
    made = join_paths([["e1", "e2", "e3", "gone"], ["e1", "e5"], ["e6"]], recorded)
    assert [(path.label, path.exchange_ids) for path in made] == [
        ("main conversation", ["e1", "e2", "e5"]),
        ("main conversation, branch 1", ["e3"]),
        ("further conversation 2", ["e6"]),  # another temperature
    ]
    answer = describe(made, None)
    assert [s.role for s in answer.spans] == ["prompt", "policy", "user", "policy", "tool", "policy"]


def test_the_newest_token_files_are_kept(paths: ModelPaths) -> None:
    for step in (1, 4, 7, 8):
        paths.step(step).mkdir(parents=True)
        (paths.step(step) / "tokens.safetensors").write_bytes(b"x")
        (paths.step(step) / "plan-job.json").write_bytes(b"{}")
    remove_old_token_files(paths.steps, newest=8, keep=2)
    assert [(paths.step(s) / "tokens.safetensors").exists() for s in (1, 4, 7, 8)] == [False, False, True, True]
    assert all((paths.step(s) / "plan-job.json").exists() for s in (1, 4, 7, 8))
    remove_old_token_files(paths.steps, newest=8, keep=0)
    assert not list(paths.steps.rglob("tokens.safetensors"))
    remove_old_token_files(paths.root / "none", newest=8, keep=0)
