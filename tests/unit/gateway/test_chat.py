"""Chat completions on a scripted engine: what the client gets, and what is recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art.errors import ContextLengthError, InvalidRequestError, NotFoundError, OverloadedError, ProcessError
from art.gateway.policies import PolicyRef
from tests.support.gateway import LOOK_UP, Bench, accumulate, open_bench, system, user


async def test_an_answer_is_recorded_as_an_exchange(bench: Bench) -> None:
    bench.answers("hello world")
    response = await bench.chat(system("be brief"), user("hi"), temperature=0.7, top_p=0.9, seed=11)
    choice = response["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world"}
    assert choice["finish_reason"] == "stop"
    assert (response["policy_version"], response["model"], response["object"]) == (3, "games/agent", "chat.completion")
    exchange = bench.exchange(response)
    tokenizer = bench.renderer.tokenizer
    assert exchange.prompt_token_ids == bench.renderer.render([system("be brief"), user("hi")], None)
    assert tokenizer.text(exchange.completion_token_ids) == "hello world<|im_end|>"
    assert exchange.sampling_logprobs == [-0.5 - 0.001 * i for i in range(len(exchange.completion_token_ids))]
    assert (exchange.temperature, exchange.top_p, exchange.seed) == (0.7, 0.9, 11)
    assert (exchange.project, exchange.name, exchange.policy_version) == ("games", "agent", 3)
    assert (exchange.parent_id, exchange.branch_reason, exchange.rollout_id) == (None, None, None)
    assert exchange.request_messages == [system("be brief"), user("hi")]
    prompt, completion = len(exchange.prompt_token_ids), len(exchange.completion_token_ids)
    assert response["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    sent = bench.engine.requests[0]
    assert (sent.adapter, sent.seed, sent.temperature, sent.top_p) == ("games/agent@3", 11, 0.7, 0.9)


async def test_each_choice_has_its_own_seed_and_exchange(bench: Bench) -> None:
    bench.answers("hello", "world", "END")
    response = await bench.chat(user("hi"), n=3, seed=2**64 - 1)
    assert sorted(choice["message"]["content"] for choice in response["choices"]) == ["END", "hello", "world"]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    exchanges = [bench.exchange(response, i) for i in range(3)]
    assert [exchange.seed for exchange in exchanges] == [2**64 - 1, 0, 1]
    assert len({exchange.id for exchange in exchanges}) == 3
    assert response["usage"]["prompt_tokens"] == len(exchanges[0].prompt_token_ids)
    assert response["usage"]["completion_tokens"] == sum(len(exchange.completion_token_ids) for exchange in exchanges)


async def test_an_answer_is_recorded_with_the_policy_that_sampled_it(bench: Bench) -> None:
    """The policy may be replaced between the look-up of the model name and the call of the engine."""
    resolver, before = bench.resolver, bench.resolver.policy

    def is_ready(policy: PolicyRef) -> bool:
        resolver.policy = replace(before, policy_version=4, adapter="games/agent@4")
        return policy is not before

    resolver.is_ready = is_ready
    bench.answers("hello")
    response = await bench.chat(user("hi"))
    assert bench.engine.requests[0].adapter == "games/agent@4"
    assert bench.exchange(response).policy_version == 4


async def test_a_seed_is_drawn_and_recorded(bench: Bench) -> None:
    bench.answers("a", "a")
    seeds = {bench.exchange(await bench.chat(user("hi"))).seed for _ in range(2)}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_negative_seed_is_taken_modulo_2_64(bench: Bench) -> None:
    bench.answers("a")
    assert bench.exchange(await bench.chat(user("hi"), seed=-1)).seed == 2**64 - 1


async def test_an_answer_ends_at_the_token_limit(bench: Bench) -> None:
    bench.answers("hello world hello world")
    response = await bench.chat(user("hi"), max_tokens=2)
    assert response["choices"][0]["finish_reason"] == "length"
    assert bench.exchange(response).finish_reason == "length"
    assert len(bench.exchange(response).completion_token_ids) == 2


async def test_the_limit_defaults_to_the_rest_of_the_context(bench: Bench) -> None:
    bench.answers("a", "a", "a")
    prompt = (await bench.chat(user("hi")))["usage"]["prompt_tokens"]
    await bench.chat(user("hi"), max_completion_tokens=7)
    await bench.chat(user("hi"), max_tokens=10_000_000)
    assert [request.max_tokens for request in bench.engine.requests] == [4096 - prompt, 7, 4096 - prompt]


async def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    async with open_bench(tmp_path, tokenizer_dir, max_context=32) as bench:
        with pytest.raises(ContextLengthError, match=r"tokens long.*32 tokens"):
            await bench.chat(user("hello world " * 40))


async def test_unknown_model_and_engine_errors_pass_through(bench: Bench) -> None:
    with pytest.raises(NotFoundError):
        await bench.chat(user("hi"), model="games/nobody")
    bench.engine.error = OverloadedError("full")
    with pytest.raises(OverloadedError):
        await bench.chat(user("hi"))


async def test_an_engine_that_stops_without_a_finish_reason_is_an_error(bench: Bench) -> None:
    async def nothing(request: Any, *, stream: bool) -> Any:
        return
        yield

    bench.engine.generate = nothing
    with pytest.raises(ProcessError):
        await bench.chat(user("hi"))


async def test_reasoning(bench: Bench) -> None:
    bench.answers("<think>\nlet me see\n</think>\n\nhello\n")
    response = await bench.chat(user("hi"))
    assert response["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello\n",
        "reasoning_content": "let me see",
    }


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'


async def test_tool_calls(bench: Bench) -> None:
    bench.answers(f"I look.\n{CALL}\n{CALL}")
    response = await bench.chat(user("hi"), tools=[LOOK_UP])
    choice = response["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "look_up", "arguments": '{"key": "a b"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(len(call["id"]) <= 40 for call in calls)


async def test_a_lone_tool_call_has_null_content(bench: Bench) -> None:
    bench.answers(CALL)
    message = (await bench.chat(user("hi"), tools=[LOOK_UP]))["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.parametrize("fields", [{}, {"tools": [LOOK_UP], "tool_choice": "none"}])
async def test_without_tools_a_tool_call_is_text(bench: Bench, fields: dict[str, Any]) -> None:
    bench.answers(CALL)
    choice = (await bench.chat(user("hi"), **fields))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


async def test_tools_of_a_model_without_them_are_refused(tmp_path: Path) -> None:
    from tests.support.gateway import make_tokenizer

    plain = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    directory = make_tokenizer(tmp_path / "model", template=plain)
    async with open_bench(tmp_path, directory) as bench:
        with pytest.raises(InvalidRequestError, match="cannot call tools"):
            await bench.chat(user("hi"), tools=[LOOK_UP])


@pytest.mark.parametrize(
    ("answer", "stop", "content"),
    [
        ("hello END world", ["END"], "hello "),
        ("hello END world", " ", "hello"),
        ("hello END world", ["xyz", "ND w"], "hello E"),
        ("hello world", ["worldly"], "hello world"),
        ("a\u00e9b", ["\u00e9"], "a"),
        ("hello", ["hello"], ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(bench: Bench, answer: str, stop: Any, content: str, stream: bool) -> None:
    bench.answers(answer)
    if stream:
        chunks = await bench.stream(user("hi"), stop=stop)
        message, finish = accumulate(chunks)
        exchange = bench.recorder.get([chunks[0]["choices"][0]["exchange_id"]])[0]
    else:
        response = await bench.chat(user("hi"), stop=stop)
        message, finish = response["choices"][0]["message"], response["choices"][0]["finish_reason"]
        exchange = bench.exchange(response)
    assert message["content"] == content
    assert finish == "stop"
    assert exchange.message["content"] == content
    assert len(exchange.completion_token_ids) == len(exchange.sampling_logprobs)
    text = bench.renderer.tokenizer.text(exchange.completion_token_ids)
    strings = [stop] if isinstance(stop, str) else stop
    if content != answer:  # the record ends with the token that completed the stop string
        ends = [text.index(string) + len(string) for string in strings if string in text]
        last = bench.renderer.tokenizer.text(exchange.completion_token_ids[-1:])
        assert len(text) - len(last) < min(ends) <= len(text)


async def test_logprobs(bench: Bench) -> None:
    bench.answers("h\u00e9")
    response = await bench.chat(user("hi"), logprobs=True, top_logprobs=2)
    exchange = bench.exchange(response)
    entries = response["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == exchange.sampling_logprobs
    assert bytes(b for entry in entries for b in entry["bytes"]) == "h\u00e9<|im_end|>".encode()
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert entries[0]["top_logprobs"][0]["token"] == entries[0]["token"] == "h"


async def test_exact_tokens_on_request(bench: Bench) -> None:
    fields = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    bench.answers(*["hello there"] * 3)
    whole = await bench.chat(user("hi"), **fields)
    choice = whole["choices"][0]
    exchange = bench.exchange(whole)
    assert whole["prompt_token_ids"] == exchange.prompt_token_ids
    assert choice["token_ids"] == exchange.completion_token_ids
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    chunks = await bench.stream(user("hi"), **fields)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        exchange.prompt_token_ids,
        *[None] * (len(chunks) - 1),
    ]
    entries = [entry for chunk in chunks for entry in chunk["choices"]]
    assert [i for entry in entries for i in entry["token_ids"]] == exchange.completion_token_ids
    assert "token_ids" not in (await bench.chat(user("hi")))["choices"][0]


async def test_a_request_can_set_template_settings(bench: Bench) -> None:
    bench.answers("a")
    exchange = bench.exchange(await bench.chat(user("hi"), chat_template_kwargs={"enable_thinking": False}))
    text = bench.renderer.tokenizer.text(exchange.prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(InvalidRequestError, match=r"no setting \['enable_thinkin'\].*enable_thinking") as caught:
        await bench.chat(user("hi"), chat_template_kwargs={"enable_thinkin": False})
    assert caught.value.param == "chat_template_kwargs"


async def test_cancelling_a_request_cancels_the_engine(bench: Bench) -> None:
    bench.answers("hello world")
    bench.engine.delay_s = 30
    task = asyncio.create_task(bench.chat(user("hi"), n=1))
    async with asyncio.timeout(60):
        while bench.engine.num_running != 1:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (bench.engine.num_running, bench.engine.num_cancelled) == (0, 1)


async def test_one_failing_choice_cancels_the_others(bench: Bench) -> None:
    bench.engine.delay_s = 30
    calls = []

    def script(request: Any) -> list[int]:
        calls.append(request)
        if len(calls) == 3:
            raise ProcessError("gone")
        return [1]

    bench.engine.script = script
    with pytest.raises(ProcessError):
        await bench.chat(user("hi"), n=3)
    assert bench.engine.num_running == 0
