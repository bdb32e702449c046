"""Code that asks a model becomes a trajectory: over a real socket, for ART's server and for anybody's endpoint."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx2
import openai
import pytest

import art
from art.capture import add_exchange, read_completion
from art.errors import ConfigError
from art.messages import is_choice, load_choice
from tests.support.app import KEY
from tests.support.gateway import LOOK_UP, system, user
from tests.support.served_app import ServedApp

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'


def exchange_of(messages: Any, tools: Any, choices: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    dumped = [choice.model_dump(exclude_unset=True) for choice in choices]
    return {"messages": messages, "tools": tools}, {"choices": dumped}


def model_of(served: ServedApp, whose: str) -> art.Model:
    return served.policy if whose == "policy" else served.outside


async def ask(model: art.Model, *messages: Any, **fields: Any) -> Any:
    """The message that the model answers, as an agent sends it back."""
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=list(messages), **fields
    )
    return completion.choices[0].message.model_dump(exclude_none=True)


def texts(history: art.History) -> list[Any]:
    return [message["content"] for message in history.messages()]


def exchange_ids(trajectory: art.Trajectory) -> list[str]:
    return [item.exchange_id for item in trajectory.messages_and_choices if is_choice(item)]


@pytest.mark.parametrize("whose", ["policy", "outside"])
async def test_a_conversation_with_tools_and_streams(served: ServedApp, whose: str) -> None:
    model = model_of(served, whose)
    served.app.bench.answers(CALL, "the name is hello", "goodbye", "not recorded")
    async with art.capture(model) as captured:
        start = [system("be brief"), user("what is x?")]
        called = await ask(model, *start, tools=[LOOK_UP])
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "hello"}
        answer = await ask(model, *start, called, result, tools=[LOOK_UP])
        pieces = []
        stream = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[*start, called, result, answer, user("bye")], tools=[LOOK_UP],
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == "goodbye"
        assert art.auto_trajectory() is captured.trajectory
        captured.trajectory.reward = 1.0
    await ask(model, user("after the end"))
    trajectory = captured.trajectory
    assert texts(trajectory) == ["be brief", "what is x?", "", "hello", "the name is hello", "bye", "goodbye"]
    assert [is_choice(item) for item in trajectory.messages_and_choices] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert trajectory.messages()[2]["tool_calls"][0]["function"]["name"] == "look_up"
    assert (trajectory.tools, trajectory.additional_histories, trajectory.reward) == ([LOOK_UP], [], 1.0)
    assert trajectory.metrics["duration"] > 0
    assert len(set(exchange_ids(trajectory))) == 3
    if whose == "policy":
        assert (trajectory.initial_policy_version, trajectory.final_policy_version) == (3, 3)
        assert trajectory.metadata == {"rollout_id": captured.rollout_id}
        recorded = [served.app.bench.recorder.get([key])[0] for key in exchange_ids(trajectory)]
        assert recorded[1].prompt_token_ids[: len(recorded[0].prompt_token_ids)] == recorded[0].prompt_token_ids


@pytest.mark.parametrize("whose", ["policy", "outside"])
async def test_concurrent_captures_are_apart(served: ServedApp, whose: str) -> None:
    model = model_of(served, whose)
    renderer = served.app.bench.renderer

    def echo(request: Any) -> list[int]:
        said = renderer.tokenizer.text(request.prompt_token_ids).split("user\n")[-1].split("<|im_end|>")[0]
        return [*renderer.tokenizer.encode(f"re {said}", add_special_tokens=False), renderer.stop_token_ids[0]]

    served.app.bench.engine.script = echo
    client = model.openai_client()  # made outside: the capture is that of the request

    async def rollout(name: str) -> None:
        async def sub_agent() -> None:
            await client.chat.completions.create(model=model.get_inference_name(), messages=[user(f"sub {name}")])

        first = await ask(model, user(name))
        await asyncio.gather(sub_agent(), ask(model, user(name), first, user(f"more {name}")))

    trajectories = await asyncio.gather(
        *(art.capture_auto_trajectory(rollout(name), model=model) for name in ["hello", "world", "key"])
    )
    for name, trajectory in zip(["hello", "world", "key"], trajectories, strict=True):
        assert texts(trajectory) == [name, f"re {name}", f"more {name}", f"re more {name}"]
        (sub,) = trajectory.additional_histories
        assert texts(sub) == [f"sub {name}", f"re sub {name}"]


async def test_any_client_by_the_base_url(served: ServedApp) -> None:
    served.app.bench.answers("hello", "world")
    async with (
        art.capture(served.policy) as captured,
        openai.AsyncOpenAI(base_url=captured.base_url, api_key=KEY) as client,
    ):
        response = await client.responses.create(model="games/agent", input="hi")
        assert response.output_text == "hello"
        assert texts(await captured.refresh()) == ["hi", "hello"]
        messages: Any = [user("hi"), {"role": "assistant", "content": "hello"}, user("so")]
        await client.chat.completions.create(model="games/agent", messages=messages)
    assert texts(captured.trajectory) == ["hi", "hello", "so", "world"]


async def test_code_that_blocks(served: ServedApp) -> None:
    for model in (served.policy, served.outside):
        served.app.bench.answers("hello", "world")
        async with art.capture(model) as captured:
            client = model.blocking_openai_client()
            assert model.blocking_openai_client() is client

            def agent(client: openai.OpenAI = client) -> str:
                completion = client.chat.completions.create(model="games/agent", messages=[user("hi")])
                said = {"role": "assistant", "content": completion.choices[0].message.content}
                messages: Any = [user("hi"), said, user("so")]
                stream = client.chat.completions.create(model="games/agent", messages=messages, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

            assert await asyncio.to_thread(agent) == "world"
        assert texts(captured.trajectory) == ["hi", "hello", "so", "world"]


async def test_without_a_model_the_first_one_counts(served: ServedApp) -> None:
    served.app.bench.answers("hello", "not this", "world")

    async def rollout() -> None:
        said = await ask(served.outside, user("hi"))
        await ask(served.policy, user("grade this"))
        await ask(served.outside, user("hi"), said, user("so"))
        art.auto_trajectory(required=True).log("done")

    trajectory = await art.capture_auto_trajectory(rollout())
    assert texts(trajectory) == ["hi", "hello", "so", "world"]
    assert trajectory.logs == ["done"]


async def test_what_fails_is_no_part_of_it(served: ServedApp) -> None:
    served.app.bench.answers("hello")
    async with art.capture(served.outside) as captured:
        with pytest.raises(openai.BadRequestError):
            await ask(served.outside, user("hi"), temperature=-1)
        stream = await served.outside.openai_client().chat.completions.create(
            model="games/agent", messages=[user("hi")], stream=True
        )
        await stream.close()
    assert captured.trajectory.messages_and_choices == []
    assert "closed before its end" in captured.trajectory.logs[0]

    async with art.capture(served.policy) as captured:
        assert captured.base_url.endswith(f"/rollouts/{captured.rollout_id}/v1")
    assert captured.trajectory.messages_and_choices == [], "nobody has asked"

    async def failing() -> None:
        raise KeyError("the agent's own")

    with pytest.raises(KeyError, match="the agent's own"):
        await art.capture_auto_trajectory(failing(), model=served.policy)
    assert art.auto_trajectory() is None


async def test_wrong_use(served: ServedApp) -> None:
    with pytest.raises(RuntimeError, match="no capture surrounds this call"):
        art.auto_trajectory(required=True)
    async with art.capture(served.outside) as captured:
        with pytest.raises(ConfigError, match="'other', which is not trainable"):
            _ = captured.base_url
    async with art.capture() as captured:
        with pytest.raises(ConfigError, match="without a model"):
            _ = captured.base_url


async def test_yielded_trajectories() -> None:
    async def rollout(name: str) -> str:
        art.yield_trajectory(art.Trajectory(logs=["early"]))
        await asyncio.sleep(0)
        art.yield_trajectory(art.Trajectory(logs=[name]))
        return name

    async def silent() -> None: ...

    both = await asyncio.gather(*(art.capture_yielded_trajectory(rollout(name)) for name in "ab"))
    assert [trajectory.logs for trajectory in both] == [["a"], ["b"]]
    with pytest.raises(RuntimeError, match="yielded no trajectory"):
        await art.capture_yielded_trajectory(silent())
    with pytest.raises(RuntimeError, match="no call takes this trajectory"):
        art.yield_trajectory(art.Trajectory())


def read(chunks: list[dict[str, Any]] | dict[str, Any], *, compressed: bool = False) -> list[Any]:
    """The choices of an answer."""
    headers = {"content-type": "application/json"}
    if isinstance(chunks, dict):
        raw = json.dumps(chunks).encode()
    else:
        headers["content-type"] = "text/event-stream; charset=utf-8"
        raw = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
    if compressed:
        headers["content-encoding"], raw = "gzip", gzip.compress(raw)
    return [load_choice(one) for one in read_completion(httpx2.Headers(headers), raw)["choices"]]


def piece(index: int = 0, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}]}


def test_streams_of_several_choices_and_parallel_calls() -> None:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return piece(tool_calls=[{"index": index, **fields}])

    found = read(
        [
            piece(role="assistant", content="", reasoning_content="be"),
            piece(role="assistant", reasoning_content="cause"),
            call(0, id="a", type="function", function={"name": "f", "arguments": ""}),
            call(1, id="b", type="function", function={"name": "g", "arguments": "{"}),
            call(0, function={"arguments": "{}"}),
            call(1, function={"arguments": "}"}),
            piece(1, content="two"),
            piece(1, finish_reason="stop", content=" words"),
            piece(finish_reason="tool_calls"),
            {"choices": [], "usage": {"total_tokens": 3}},
        ],
        compressed=True,
    )
    first, second = found
    assert [(c.id, c.function.name, c.function.arguments) for c in first.message.tool_calls or []] == [  # type: ignore[union-attr]
        ("a", "f", "{}"), ("b", "g", "{}"),
    ]  # fmt: skip
    assert first.message.reasoning_content == "because"  # type: ignore[attr-defined]
    assert (second.message.content, second.finish_reason) == ("two words", "stop")


def test_log_probs_of_streams_are_appended() -> None:
    def token(text: str, **fields: Any) -> dict[str, Any]:
        chunk = piece(content=text, **fields)
        entry = {"token": text, "logprob": -1.0, "bytes": None, "top_logprobs": []}
        chunk["choices"][0]["logprobs"] = {"content": [entry], "refusal": None}
        return chunk

    found = read([token("a"), token("b", finish_reason="stop")])
    assert [entry.token for entry in found[0].logprobs.content] == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("answer", [{}, {"choices": [{}]}, [piece(content="cut off")], []])
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    with pytest.raises((ValueError, LookupError)):
        read(answer)


def test_calls_that_are_no_function_or_no_json_continue_a_conversation() -> None:
    calls: list[dict[str, Any]] = [
        {"id": "a", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{"}},
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = load_choice({"index": 0, "finish_reason": "tool_calls", "message": message})
    spaced = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    histories: list[art.History] = []
    add_exchange(histories, *exchange_of([user("q")], None, [answer]))
    again = {"role": "assistant", "tool_calls": [*calls[:2], spaced]}
    add_exchange(histories, *exchange_of([user("q"), again, user("r")], None, [answer]))
    (history,) = histories
    assert [is_choice(item) for item in history.messages_and_choices] == [False, True, False, True]


def test_branches_and_changed_answers_are_conversations_of_their_own() -> None:
    def choice(text: str) -> Any:
        message = {"role": "assistant", "content": text, "reasoning_content": "why"}
        return load_choice({"index": 0, "finish_reason": "stop", "message": message})

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    histories: list[art.History] = []
    add_exchange(histories, *exchange_of([user("q")], None, [choice("a"), choice("b")]))
    add_exchange(histories, *exchange_of([user("q"), said("b"), user("r")], None, [choice("c")]))
    add_exchange(histories, *exchange_of([user("q"), said("b, edited"), user("r")], [], [choice("d")]))
    add_exchange(histories, *exchange_of([user("q"), said("a"), user("r")], [LOOK_UP], [choice("e")]))
    assert [texts(history) for history in histories] == [
        ["q", "a"], ["q", "b", "r", "c"], ["q", "b, edited", "r", "d"], ["q", "a", "r", "e"],
    ]  # fmt: skip
    assert [sum(map(is_choice, history.messages_and_choices)) for history in histories] == [1, 2, 1, 1]


@pytest.mark.parametrize("whose", ["policy", "outside"])
async def test_a_trajectory_is_a_block_too(served: ServedApp, whose: str) -> None:
    model = model_of(served, whose)
    served.app.bench.answers("one", "two", "not captured", "elsewhere")
    with art.Trajectory(reward=1.0) as trajectory:
        assert art.current_trajectory(required=True) is trajectory
        first = await ask(model, user("a"))
        async for _ in await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[user("a"), first, user("b")], stream=True
        ):
            pass
        with art.no_capture():
            await ask(model, user("judge this"))
            assert art.current_trajectory() is None
        with pytest.raises(RuntimeError, match="already open"):
            trajectory.__enter__()
    await ask(model, user("after the end"))
    assert texts(trajectory) == ["a", "one", "b", "two"]
    assert [is_choice(item) for item in trajectory.messages_and_choices] == [False, True, False, True]
    if whose == "policy":
        recorded = served.app.bench.recorder.get(exchange_ids(trajectory))
        assert [exchange.message["content"] for exchange in recorded] == ["one", "two"]
    assert art.Trajectory.model_validate(trajectory.model_dump()).messages() == trajectory.messages()


async def test_rollouts_that_keep_no_record_become_a_group(served: ServedApp) -> None:
    served.app.bench.answers(*["hi"] * 3)

    async def rollout(number: int) -> art.Trajectory:
        if number == 2:
            raise ValueError("the tool is down")
        with art.Trajectory() as trajectory:
            await ask(served.policy, user(str(number)))
            art.current_trajectory(required=True).reward = number
        return trajectory

    group = await art.trajectory_group((rollout(i) for i in range(3)), return_exceptions=True)
    assert [trajectory.reward for trajectory in group] == [0, 1]
    assert [texts(trajectory) for trajectory in group] == [["0", "hi"], ["1", "hi"]]
    assert group.exceptions[0].message == "the tool is down"
    with pytest.raises(ValueError, match="the tool is down"):
        await art.trajectory_group([rollout(2)])
    with pytest.raises(RuntimeError, match="no capture surrounds"):
        art.current_trajectory(required=True)
