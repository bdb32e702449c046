"""Answers that go on with new weights when a step is published while they are sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from art.engine import EngineInfo, GenerateRequest, TokenChunk
from art.gateway.policies import PolicyRef
from art.protocol.answers import ChatAnswer
from art.protocol.chat_completions import parse_chat_request
from tests.support.gateway import Bench, accumulate, user

TEXT = "hello world the name END assistant user"


@pytest.fixture
def publish(bench: Bench) -> Callable[[int], None]:
    """Call it to publish a step. The engine samples `TEXT` under any weights, token by token."""
    resolver, ready = bench.resolver, {bench.resolver.policy.policy_version}
    tokens = [*bench.renderer.tokenizer.encode(TEXT, add_special_tokens=False), bench.renderer.stop_token_ids[0]]
    bench.engine.script = lambda request: tokens[request.first_index :]
    resolver.is_ready = lambda policy: policy.policy_version in ready

    def publish(step: int) -> None:
        ready.add(step)
        resolver.policy = replace(resolver.policy, policy_version=step, adapter=f"games/agent@{step}")

    return publish


def publish_after(bench: Bench, publish: Callable[[int], None], steps: dict[int, int]) -> None:
    """Publish each step when the engine has sampled a given number of tokens of an answer."""
    sample = bench.engine.generate

    async def generate(request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        count = request.first_index
        async with aclosing(sample(request, stream=stream)) as chunks:
            async for chunk in chunks:
                count += len(chunk.token_ids)
                if (step := steps.pop(count, None)) is not None:
                    publish(step)
                yield chunk

    bench.engine.generate = generate


async def ask(bench: Bench, **fields: Any) -> dict[str, Any]:
    request = parse_chat_request({"model": "games/agent", "messages": [user("hi")], **fields})
    return await bench.gateway.complete(request, switches=True)


async def test_an_answer_goes_on_with_each_published_step_and_the_record_says_where(
    bench: Bench, publish: Callable[[int], None]
) -> None:
    publish_after(bench, publish, {2: 4, 5: 6})
    response = await ask(bench, logprobs=True, seed=7)
    choice = response["choices"][0]
    assert choice["message"]["content"] == TEXT
    exchange = bench.exchange(response)
    num_tokens = len(exchange.completion_token_ids)
    assert exchange.segments == [(3, 2), (4, 3), (6, num_tokens - 5)]
    assert (exchange.policy_version, choice["exchange"]["segments"]) == (3, exchange.segments)
    ChatAnswer.model_validate(json.loads(json.dumps(response)))
    assert len(choice["logprobs"]["content"]) == len(exchange.sampling_logprobs) == num_tokens
    first, second, third = bench.engine.requests
    assert [sent.adapter for sent in bench.engine.requests] == [f"games/agent@{step}" for step in (3, 4, 6)]
    assert second.prompt_token_ids == [*first.prompt_token_ids, *exchange.completion_token_ids[:2]]
    assert (third.first_index, third.max_tokens, third.seed) == (5, first.max_tokens - 5, 7)
    assert len({sent.request_id for sent in bench.engine.requests}) == 3
    assert bench.engine.num_running == 0
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] <= len(first.prompt_token_ids)


async def test_the_next_turn_continues_the_recorded_tokens(bench: Bench, publish: Callable[[int], None]) -> None:
    publish_after(bench, publish, {2: 4})
    response = await ask(bench)
    message = response["choices"][0]["message"]
    bench.forget()  # from the database
    follow = await bench.chat(user("hi"), message, user("more"))
    parent = bench.exchange(response)
    assert bench.exchange(follow).parent_id == parent.id
    assert (
        bench.recorder.get_answers([parent.id])[parent.id].segments
        == parent.segments
        == [(3, 2), (4, parent.segments[1][1])]
    )


async def test_without_the_wish_an_answer_ends_with_the_weights_it_began_with(
    bench: Bench, publish: Callable[[int], None]
) -> None:
    publish_after(bench, publish, {2: 4})
    response = await bench.chat(user("hi"))
    assert (bench.exchange(response).policy_version, bench.exchange(response).segments) == (3, [])
    assert "segments" not in response["choices"][0]["exchange"]
    assert len(bench.engine.requests) == 1


async def test_a_cleared_cache_alone_changes_nothing(bench: Bench, publish: Callable[[int], None]) -> None:
    """Another model's step clears the resolver's cache too."""
    resolver, policy = bench.resolver, bench.resolver.policy

    async def resolve(model: str) -> PolicyRef:
        return policy

    resolver.resolve_ready = lambda model: None
    resolver.resolve = resolve
    response = await ask(bench)
    assert len(bench.engine.requests) == 1
    assert bench.exchange(response).segments == []


async def test_a_stream_a_stop_string_and_several_choices_switch_too(
    bench: Bench, publish: Callable[[int], None]
) -> None:
    publish_after(bench, publish, {2: 4})
    fields = {"model": "games/agent", "messages": [user("hi")], "stream": True, "stop": ["END"], "n": 2}
    stream = await bench.gateway.stream(parse_chat_request(fields), switches=True)
    chunks = [chunk async for chunk in stream.chunks]
    for choice in range(2):
        assert accumulate(chunks, choice)[0]["content"] == TEXT[: TEXT.index("END")]
    ends = [part for chunk in chunks for part in chunk["choices"] if part["finish_reason"]]
    exchanges = bench.recorder.get(part["exchange_id"] for part in ends)
    for exchange in exchanges:
        assert sum(count for _, count in exchange.segments) in (0, len(exchange.completion_token_ids))
    assert any(exchange.segments for exchange in exchanges)


async def test_merged_weights_are_left_before_they_are_replaced(bench: Bench, publish: Callable[[int], None]) -> None:
    """An engine with one policy exchanges it when no request runs: the answer must stop before it asks for the new one."""
    resolver, before = bench.resolver, bench.resolver.policy
    sample = bench.engine.generate
    closing = False

    async def generate(request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        nonlocal closing
        async with aclosing(sample(request, stream=stream)) as chunks:
            async for chunk in chunks:
                closing |= request.adapter == before.adapter
                yield chunk

    async def resolve(model: str) -> PolicyRef:
        nonlocal closing
        assert bench.engine.num_running == 0, "the exchange would wait for this request for ever"
        closing = False
        publish(4)
        return resolver.policy

    bench.engine.generate = generate
    resolver.is_ready = lambda policy: not closing
    resolver.resolve_ready = lambda model: None if closing else resolver.policy
    resolver.resolve = resolve
    exchange = bench.exchange(await ask(bench))
    assert exchange.segments == [(3, 1), (4, len(exchange.completion_token_ids) - 1)]


async def test_a_constrained_answer_ends_as_it_began_where_the_engine_cannot_resume_it(
    bench: Bench, publish: Callable[[int], None]
) -> None:
    info = await bench.engine.info()
    bench.engine.script = lambda request: [
        *bench.renderer.tokenizer.encode('{"a": 1}', add_special_tokens=False), bench.renderer.stop_token_ids[0]
    ][request.first_index :]  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

    async def count_parts(*, resumes: bool) -> int:
        async def described() -> EngineInfo:
            return replace(info, grammars=True, resumes_grammars=resumes)

        bench.engine.info = described
        bench.engine.requests.clear()
        publish_after(bench, publish, {2: bench.resolver.policy.policy_version + 1})
        await ask(bench, response_format=form)
        return len(bench.engine.requests)

    assert await count_parts(resumes=True) == 2
    assert await count_parts(resumes=False) == 1


async def test_a_client_that_hangs_up_cancels_the_part_that_runs(bench: Bench, publish: Callable[[int], None]) -> None:
    bench.engine.delay_s = 0.01
    publish_after(bench, publish, {2: 4})
    task = asyncio.create_task(ask(bench))
    while len(bench.engine.requests) < 2:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.engine.num_running == 0
