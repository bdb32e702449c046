"""Trajectories and groups: conversion, lossless dumps, awaiting."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import math
import time
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion import ChatCompletion, Choice
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from pydantic import BaseModel, ValidationError

from art.client.submission import wire_trajectory
from art.errors import TrajectoryError
from art.messages import to_message
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup, is_policy_fault

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}


def a_choice(**fields: Any) -> Choice:
    message = {"role": "assistant", "content": "hello", **fields.pop("message", {})}
    data = {"finish_reason": "stop", "index": 0, "message": message, "exchange_id": "ex-1", **fields}
    return Choice.model_validate(data)


LOGPROBS = {
    "content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [], "token_id": 7}],
    "refusal": None,
}


class ProjectTrajectory(Trajectory):
    final_answer: str | None = None


class CitedTrajectory(ProjectTrajectory):
    sources: list[str] = []


def round_trips(record: Any) -> list[Any]:
    cls = type(record)
    return [
        cls(**record.model_dump()),
        cls.model_validate(record.model_dump()),
        cls.model_validate_json(record.model_dump_json()),
        cls(**json.loads(record.model_dump_json())),
        cls(**record.model_dump(mode="json")),
        copy.deepcopy(record),
        copy.copy(record),
        record.model_copy(deep=True),
    ]


def full_trajectory() -> Trajectory:
    trajectory = Trajectory(
        messages_and_choices=[
            USER,
            a_choice(
                logprobs=LOGPROBS,
                finish_reason="tool_calls",
                message={"content": None, "tool_calls": [CALL], "reasoning_content": "think"},
            ),
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            a_choice(),
        ],
        tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        reward=0.25,
        turn_rewards=[0.5, -1.0],
        token_rewards=[[0.0, 1.0], [2.0]],
        additional_histories=[History(messages_and_choices=[USER, a_choice(exchange_id="ex-2")])],
        metrics={"win": True, "turns": 3, "speed": 1.0},
        metadata={"scenario_id": "s", "n": 1, "f": 1.0, "b": False, "none": None},
        logs=["one"],
        initial_policy_version=3,
    )
    trajectory.log("two")
    return trajectory


class Puzzle(BaseModel):
    id: str
    clues: list[int]


def test_further_keyword_arguments_are_kept_as_metadata() -> None:
    trajectory = Trajectory(
        reward=1.0, metadata={"split": "train", "try_number": 2}, scenario=Puzzle(id="p", clues=[1, 2]), try_number=2,
        path=Path("x"), missing=None,
    )  # fmt: skip
    assert trajectory.metadata == {
        "split": "train", "try_number": 2, "scenario": '{"id":"p","clues":[1,2]}', "path": '"x"', "missing": None,
    }  # fmt: skip
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory

    class WithAnswer(Trajectory):
        answer: str | None = None

    own = WithAnswer(answer="yes", scenario_id="s")
    assert (own.answer, own.metadata) == ("yes", {"scenario_id": "s"})
    with pytest.raises(ValueError, match="'try_number' is given twice"):
        Trajectory(metadata={"try_number": 1}, try_number=2)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("rewards", "reward"), ("meta_data", "metadata"), ("metric", "metrics"), ("tool", "tools"),
        ("messages", "messages_and_choices"), ("message_and_choices", "messages_and_choices"),
        ("turn_reward", "turn_rewards"),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_a_field_is_an_error(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"has no field '{name}': write `{field}`"):
        Trajectory(**{name: 1})


def test_unknown_keys_of_dumps_and_groups_are_errors() -> None:
    with pytest.raises(ValidationError, match="scenario"):
        Trajectory.model_validate({"scenario": "s"})
    with pytest.raises(ValidationError, match="metadatas"):
        TrajectoryGroup([], metadatas={})


def test_a_copied_group_has_lists_of_its_own() -> None:
    group = TrajectoryGroup([full_trajectory()], metadata={"a": 1}, logs=["x"])
    copied = copy.copy(group)
    copied.trajectories.clear()
    copied.metadata["a"] = 2
    copied.log("y")
    assert (len(group), group.metadata, group.logs) == (1, {"a": 1}, ["x"])
    assert copy.copy(group).trajectories[0] is group.trajectories[0]
    assert copy.copy(group) == group


@pytest.mark.parametrize("index", range(8))
def test_trajectory_survives_every_round_trip(index: int) -> None:
    trajectory = full_trajectory()
    again = round_trips(trajectory)[index]
    assert again == trajectory
    assert isinstance(again.messages_and_choices[1], Choice)
    assert again.messages_and_choices[1].exchange_id == "ex-1"  # type: ignore[attr-defined]
    assert again.messages_and_choices[1].logprobs.content[0].token_id == 7
    assert isinstance(again.additional_histories[0].messages_and_choices[1], Choice)
    assert [type(value) for value in again.metrics.values()] == [bool, int, float]
    assert [type(value) for value in again.metadata.values()] == [str, int, float, bool, type(None)]
    assert again.start_time == trajectory.start_time


@pytest.mark.parametrize("index", range(8))
def test_group_survives_every_round_trip(index: int) -> None:
    group = TrajectoryGroup(
        [full_trajectory(), ValueError("bad"), ProjectTrajectory(final_answer="x"), CitedTrajectory(sources=["a"])],
        exceptions=[KeyError("k")],
        metadata={"scenario_id": 3},
        metrics={"judge": 0.5},
        logs=["g"],
    )
    again = round_trips(group)[index]
    assert again == group
    assert [type(item) for item in again] == [Trajectory, ProjectTrajectory, CitedTrajectory]
    assert [item.type for item in again.exceptions] == ["KeyError", "ValueError"]
    assert again.trajectories[1].final_answer == "x"  # type: ignore[attr-defined]


def test_group_dump_with_a_key_that_no_class_has_is_an_error() -> None:
    with pytest.raises(ValidationError, match="no_such_field"):
        TrajectoryGroup([{"reward": 1.0, "no_such_field": 1}])


def test_deepcopy_is_independent() -> None:
    group = TrajectoryGroup([full_trajectory()])
    other = copy.deepcopy(group)
    other.trajectories[0].metrics["win"] = False
    other.trajectories[0].messages_and_choices[0]["content"] = "changed"  # type: ignore[index]
    assert group.trajectories[0].metrics["win"] is True
    assert group.trajectories[0].messages_and_choices[0]["content"] == "hi"  # type: ignore[index]


@given(
    reward=st.floats(allow_nan=False),
    metrics=st.dictionaries(
        st.text(), st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False))
    ),
    metadata=st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.text(), st.integers(-(2**53), 2**53))),
    contents=st.lists(st.one_of(st.none(), st.text())),
)
def test_any_trajectory_is_lossless(reward: float, metrics: Any, metadata: Any, contents: list[str | None]) -> None:
    items = [{"role": "assistant", "content": content} for content in contents]
    trajectory = Trajectory(messages_and_choices=items, reward=reward, metrics=metrics, metadata=metadata)
    assert Trajectory(**trajectory.model_dump()) == trajectory
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def test_nan_reward_survives_json() -> None:
    again = Trajectory.model_validate_json(Trajectory(reward=math.nan, metrics={"m": math.nan}).model_dump_json())
    assert math.isnan(again.reward)
    assert math.isnan(again.metrics["m"])


def test_numpy_scalars_become_python_numbers() -> None:
    np = pytest.importorskip("numpy")
    trajectory = Trajectory(reward=np.float32(0.5))
    trajectory.metrics["n"] = np.int64(3)
    trajectory.metrics["ok"] = np.bool_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Trajectory.model_validate_json(trajectory.model_dump_json())
    assert again.reward == 0.5
    assert again.metrics == {"n": 3, "ok": True}
    assert type(again.metrics["ok"]) is bool


def test_messages_are_what_the_next_request_sends() -> None:
    messages = full_trajectory().messages()
    assert messages[0] == USER
    assert messages[1] == {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [CALL]}
    assert messages[3] == {"role": "assistant", "content": "hello"}


def test_to_message_keeps_refusal_and_audio_and_fills_content() -> None:
    refused = a_choice(message={"content": None, "refusal": "no"})
    assert to_message(refused) == {"role": "assistant", "content": "", "refusal": "no"}
    spoken = a_choice(message={"audio": {"id": "au", "data": "x", "expires_at": 1, "transcript": "t"}})
    assert to_message(spoken)["audio"] == {"id": "au"}
    none = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert to_message(none)["content"] == ""
    assert none["content"] is None, "the caller's dict is left alone"


def test_items_that_agents_get_wrong() -> None:
    completion = ChatCompletion(id="1", choices=[a_choice()], created=0, model="m", object="chat.completion")
    with pytest.raises(ValidationError, match=r"completion\.choices\[0\]"):
        Trajectory(messages_and_choices=[completion])  # type: ignore[list-item]
    with pytest.raises(ValidationError, match="'role'"):
        Trajectory(messages_and_choices=[{"content": "x"}])  # type: ignore[list-item]
    with pytest.raises(ValidationError, match="list of messages"):
        Trajectory(messages_and_choices="hi")  # type: ignore[arg-type]
    message = ChatCompletionMessage(role="assistant", content="x")
    assert Trajectory(messages_and_choices=[message]).messages_and_choices == [{"role": "assistant", "content": "x"}]  # type: ignore[list-item]


def test_tool_calls_as_objects_inside_a_message_dump() -> None:
    choice = a_choice(message={"content": None, "tool_calls": [CALL]})
    trajectory = Trajectory()
    trajectory.messages_and_choices.append(
        {"role": "assistant", "content": None, "tool_calls": choice.message.tool_calls}  # type: ignore[typeddict-item,arg-type]
    )
    again = Trajectory.model_validate_json(trajectory.model_dump_json())
    assert again.messages()[0]["tool_calls"] == [CALL]  # type: ignore[typeddict-item]


def test_for_logging_and_str() -> None:
    shown = full_trajectory().for_logging()
    assert [message["trainable"] for message in shown["messages"]] == [False, True, False, True]
    assert (shown["reward"], shown["turn_rewards"]) == (0.25, [0.5, -1.0])
    assert "turn_rewards" not in Trajectory().for_logging()
    json.dumps(shown)
    assert "reward=0.25" in str(full_trajectory())


async def test_durations() -> None:
    began = time.monotonic()
    trajectory = Trajectory(start_time=datetime.now(UTC) - timedelta(seconds=5))
    for _ in range(2):
        async with trajectory.track_duration("tool"):
            await asyncio.sleep(0.02)
    with pytest.raises(ValueError):
        async with trajectory.track_duration("tool"):
            raise ValueError
    assert 0.04 <= trajectory.metrics["tool_duration"] <= time.monotonic() - began
    assert trajectory.finish() is trajectory
    assert 5 <= trajectory.metrics["duration"] < 6 + time.monotonic() - began
    naive = Trajectory(start_time=datetime.now())
    assert 0 <= naive.finish().metrics["duration"] < 1 + time.monotonic() - began


def test_exception_record_leaves_out_frames_of_asyncio() -> None:
    async def fail() -> None:
        raise ValueError("boom")

    try:
        asyncio.run(fail())
    except ValueError as error:
        record = PydanticException.from_exception(error)
    assert (record.type, record.message) == ("ValueError", "boom")
    assert "in fail" in record.traceback
    assert "runners.py" not in record.traceback


# --- awaiting ---


async def rollout(number: int, *, delay_s: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay_s)
    return Trajectory(reward=float(number))


async def test_awaited_group_keeps_input_order() -> None:
    pending = TrajectoryGroup((rollout(i, delay_s=0.03 - i * 0.01) for i in range(3)), metadata={"a": 1})
    assert pending.num_trajectories == 3  # type: ignore[attr-defined]
    group = await pending
    assert [item.reward for item in group] == [0, 1, 2]
    assert group.metadata == {"a": 1}


async def test_awaitables_and_finished_items_may_be_mixed() -> None:
    group = await TrajectoryGroup([rollout(0), Trajectory(reward=1.0), asyncio.create_task(rollout(2)), KeyError("x")])  # type: ignore[misc,list-item,call-overload]
    assert [item.reward for item in group] == [0, 1, 2]
    assert [item.type for item in group.exceptions] == ["KeyError"]


async def test_outside_of_a_gather_the_first_failure_raises_and_stops_the_rest() -> None:
    cancelled = []

    async def slow() -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return Trajectory()

    async def fail() -> Trajectory:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await TrajectoryGroup([slow(), fail()])
    assert cancelled == [True]
    assert len(asyncio.all_tasks()) == 1, "no orphan"


async def test_cancelling_the_group_cancels_its_rollouts() -> None:
    task = asyncio.create_task(TrajectoryGroup(rollout(i, delay_s=60) for i in range(3)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_a_pending_group_that_is_dropped_warns_once_at_most() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = asyncio.create_task(TrajectoryGroup(rollout(i) for i in range(3)))
        task.cancel()  # before it has started
        with pytest.raises(asyncio.CancelledError):
            await task
        TrajectoryGroup(rollout(i) for i in range(3)).close()


@pytest.mark.parametrize(
    ("trajectories", "got"), [(None, "NoneType"), (Trajectory(), "Trajectory"), (3, "int"), (asyncio.sleep, "function")]
)
def test_a_group_of_something_else_is_refused_by_name(trajectories: Any, got: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"takes the rollouts of one scenario, .*; got one \w*{got}"):
        TrajectoryGroup(trajectories)


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_a_group_of_one_rollout_that_is_in_no_list() -> None:
    async def rollout() -> Trajectory:
        return Trajectory()

    with pytest.raises(
        TrajectoryError, match=r"\(rollout\(model, scenario\) for _ in range\(8\)\).*; got one coroutine"
    ):
        TrajectoryGroup(rollout())
    gc.collect()


def test_a_reward_of_none_is_told_in_plain_words() -> None:
    with pytest.raises(ValidationError, match="a reward is a number, got None; leave `reward` out until it is known"):
        Trajectory(reward=None)  # type: ignore[arg-type]


async def test_a_rollout_that_forgets_to_return() -> None:
    async def forgetful() -> Trajectory:
        return None  # type: ignore[return-value]

    with pytest.raises(TrajectoryError, match=r"returned None; it must return an art\.Trajectory"):
        await TrajectoryGroup([forgetful()])


@pytest.mark.parametrize(
    ("metrics", "metadata", "spoilt"),
    [
        ({}, {}, False),
        ({}, {"outcome": "ok"}, False),
        ({}, {"outcome": "policy_fault"}, True),
        ({"invalid_move": 1.0}, {}, True),
        ({"invalid_move": 0.0}, {}, False),
        ({"num_invalid_actions": 2}, {}, True),
        ({"protocol_error": True}, {}, True),
        ({"invalidated": 1.0, "is_invalid_b": 1.0}, {}, False),
    ],
)
def test_a_rollout_says_whether_the_policy_has_spoilt_it(metrics: dict, metadata: dict, spoilt: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    trajectory = Trajectory(messages_and_choices=messages, metrics=metrics, metadata=metadata)
    assert is_policy_fault(trajectory) == spoilt
    assert wire_trajectory(trajectory, "trajectory").policy_fault == spoilt
