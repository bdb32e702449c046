"""Streamed answers have the tokens and the message of a plain answer, whatever the engine samples."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art.errors import OverloadedError
from art.protocol.chat_completions import parse_chat_request
from art.record.recorder import exchange_time, new_exchange_id
from art.record.rollout_store import rollout_histories
from tests.support.gateway import LOOK_UP, Bench, accumulate, open_bench, user

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "\u00e9"}}\n</tool_call>'


async def test_a_stream_has_the_shape_of_openais(bench: Bench) -> None:
    bench.answers("h\u00e9llo")
    chunks = await bench.stream(user("hi"), stream_options={"include_usage": True}, logprobs=True)
    first, last, usage = chunks[0], chunks[-2], chunks[-1]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    exchange = bench.recorder.get([first["choices"][0]["exchange_id"]])[0]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(exchange.completion_token_ids))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {choice["exchange_id"] for chunk in chunks for choice in chunk["choices"]} == {
        first["choices"][0]["exchange_id"]
    }
    reports = [r for chunk in chunks for c in chunk["choices"] for r in (c["logprobs"] or {}).get("content", [])]
    assert [report["logprob"] for report in reports] == exchange.sampling_logprobs


async def test_a_choice_names_step_times_and_tokens_of_its_exchange(bench: Bench) -> None:
    bench.answers("one", "two")
    began = time.time()
    whole = (await bench.chat(user("hi"), rollout_id="r1"))["choices"][0]
    chunks = await bench.stream(user("hello"))
    (last,) = [choice for chunk in chunks for choice in chunk["choices"] if "exchange" in choice]
    assert last["finish_reason"] is not None
    for choice in (whole, last):
        exchange, (recorded,) = choice["exchange"], bench.recorder.get([choice["exchange_id"]])
        assert exchange["policy_version"] == recorded.policy_version
        assert exchange["prompt_tokens"] == len(recorded.prompt_token_ids)
        assert exchange["completion_tokens"] == len(recorded.completion_token_ids)
        assert began <= exchange["started_at"] + 1e-5
        assert exchange["started_at"] <= exchange["ended_at"] == recorded.created_at <= time.time()
    assert rollout_histories([bench.recorder.get([whole["exchange_id"]])[0]])[0]["messages_and_choices"][1] == {
        **whole, "logprobs": None,
    }  # fmt: skip


def test_an_id_of_another_form_has_no_time() -> None:
    assert [exchange_time(text) for text in ("ex_check", "other", "ex_", "ex_12")] == [None, None, None, 18 / 1e6]
    assert time.time() - 5 < (exchange_time(new_exchange_id()) or 0) <= time.time()


async def test_text_is_streamed_in_whole_characters(bench: Bench) -> None:
    bench.answers("a\U0001f642b c")
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in await bench.stream(user("hi"))]
    assert [delta for delta in deltas if delta] == ["a", "\U0001f642", "b", " c"]


async def test_tool_calls_and_reasoning_are_streamed_as_deltas(bench: Bench) -> None:
    bench.answers(f"<think>\nhm hm\n</think>\n\nI look\n{CALL}\n{CALL}")
    chunks = await bench.stream(user("hi"), tools=[LOOK_UP])
    message, finish = accumulate(chunks)
    assert finish == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("hm hm", "I look")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"key": "\u00e9"}'] * 2
    indices = [call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert indices == [0, 1]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "<" not in streamed


async def test_choices_are_interleaved(bench: Bench) -> None:
    bench.answers("one", "two", "three")
    chunks = await bench.stream(user("hi"), n=3)
    assert sorted(accumulate(chunks, i)[0]["content"] for i in range(3)) == ["one", "three", "two"]


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message if calls is None else message | {"tool_calls": [call | {"id": ""} for call in calls]}


@pytest.fixture(scope="module")
def loop_bench(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Any:
    """A bench with its own event loop, for property tests."""
    loop = asyncio.new_event_loop()
    opened = open_bench(tmp_path_factory.mktemp("db"), tokenizer_dir)
    bench = loop.run_until_complete(opened.__aenter__())
    yield bench, loop
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()


PIECES = ["hello", " ", "\n", "\u00e9", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "END", "\U0001f642"]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_streamed_answer_equals_a_plain_one(loop_bench: Any, data: st.DataObject) -> None:
    bench, loop = loop_bench
    ids = bench.renderer.tokenizer.encode("".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=8))), False)
    ids += data.draw(st.lists(st.integers(0, 390), max_size=4))
    ids = [token for token in ids if token not in bench.renderer.stop_token_ids]
    ids += [bench.renderer.stop_token_ids[0]] * data.draw(st.integers(0, 1)) or [40]
    bench.engine.script = lambda request: ids
    fields: dict[str, Any] = {"seed": 5}
    if data.draw(st.booleans()):
        fields["tools"] = [LOOK_UP]
    if data.draw(st.booleans()):
        fields["stop"] = data.draw(st.sampled_from([["END"], "\n", ["\u00e9", "lo w"], "</think>"]))
    if data.draw(st.booleans()):
        fields["max_tokens"] = data.draw(st.integers(1, 6))

    async def both() -> tuple[Any, Any]:
        return await bench.chat(user("hi"), **fields), await bench.stream(user("hi"), **fields)

    plain, chunks = loop.run_until_complete(both())
    message, finish = accumulate(chunks)
    assert _without_ids(message) == _without_ids(plain["choices"][0]["message"])
    assert finish == plain["choices"][0]["finish_reason"]
    one, other = bench.recorder.get([plain["choices"][0]["exchange_id"], chunks[0]["choices"][0]["exchange_id"]])
    assert one.completion_token_ids == other.completion_token_ids
    assert one.sampling_logprobs == other.sampling_logprobs


async def test_an_error_before_the_first_token_is_raised_before_any_chunk(bench: Bench) -> None:
    bench.engine.error = OverloadedError("full")
    request = parse_chat_request({"model": "games/agent", "messages": [user("hi")], "stream": True})
    stream = (await bench.gateway.stream(request)).chunks
    with pytest.raises(OverloadedError):
        await anext(stream)


async def test_closing_a_stream_frees_the_engine(bench: Bench) -> None:
    bench.engine.script = lambda request: [5] * 1000
    bench.engine.delay_s = 0.001
    request = parse_chat_request({"model": "games/agent", "messages": [user("hi")], "stream": True, "n": 2})
    stream = (await bench.gateway.stream(request)).chunks
    async for chunk in stream:
        if chunk["choices"][0]["delta"].get("content"):
            break
    await stream.aclose()
    assert (bench.engine.num_running, bench.engine.num_cancelled) == (0, 2)


async def test_a_stop_string_ends_the_engine_early(bench: Bench) -> None:
    bench.answers("go END " + "more " * 50)
    await bench.stream(user("hi"), stop=["END"])
    bench.answers("go END " + "more " * 50)
    await bench.chat(user("hi"), stop=["END"])
    assert bench.engine.num_cancelled == 2
