"""What people who watch see of chat requests, and that it changes nothing about them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from art.errors import ProcessError
from art.gateway.chat import WATCHED_CHUNK_S
from art.gateway.live import LiveHub
from tests.support.fake_engine import FakeEngine
from tests.support.gateway import LOOK_UP, Bench, open_bench, system, user

CALL = 'one <tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


async def test_tokens_of_a_plain_request_come_as_they_are_sampled(bench: Bench) -> None:
    bench.answers(CALL)
    bench.engine.delay_s = 0.005
    bench.gateway.live = LiveHub(flush_s=0.001)
    events, stream = [], bench.gateway.live.watch("games")
    await anext(stream)
    asking = asyncio.create_task(bench.chat(system("be brief"), user("look up a"), tools=[LOOK_UP], rollout_id="r1"))
    async with asyncio.timeout(60):
        while not events or events[-1].kind != "request_ended":
            events += [event.data for event in await anext(stream)]
    started, ended, pieces = events[0], events[-1], [p for e in events if e.kind == "tokens" for p in e.pieces]
    assert (started.last_role, started.last_text, started.rollout_id) == ("user", "look up a", "r1")
    assert (started.project, started.name, started.policy_version) == ("games", "agent", 3)
    assert len(pieces) > 5  # one by one, though the client gets them as a whole
    assert "".join(piece.text for piece in pieces) == CALL + "<|im_end|>"
    response = await asking
    exchange = bench.exchange(response)
    assert {piece.id for piece in pieces} == {started.id, ended.id} == {exchange.id}
    assert sum(piece.num_tokens for piece in pieces) == ended.num_tokens == len(exchange.completion_token_ids)
    assert started.num_prompt_tokens == len(exchange.prompt_token_ids)
    assert (ended.outcome, ended.num_cached_tokens) == ("tool_calls", 3)


@pytest.mark.parametrize("fields", [{}, {"stop": ["q"]}, {"logprobs": True, "top_logprobs": 2}, {"top_k": 3}], ids=str)
async def test_a_watched_request_is_sampled_and_recorded_as_any_other(
    tmp_path: Path, tokenizer_dir: Path, fields: dict[str, object]
) -> None:
    engine = FakeEngine(vocab_size=400, delay_s=0.0002)
    async with open_bench(tmp_path, tokenizer_dir, engine=engine) as bench:
        bench.resolver.policy = replace(bench.resolver.policy, adapter=None)
        answers, exchanges = [], []
        for is_watched in (False, True):
            stream = bench.gateway.live.watch(None)
            if is_watched:
                await anext(stream)
            answers.append(await bench.chat(user("hi"), seed=7, max_tokens=60, **fields))
            exchanges.append(asdict(bench.exchange(answers[-1])))
            assert engine.requests[-1].chunk_every_s == (0.0 if "stop" in fields else WATCHED_CHUNK_S)
        for exchange, answer in zip(exchanges, answers, strict=True):
            del exchange["id"], exchange["created_at"]
            exchange["message"].pop("exchange_id", None)
            for name in ("id", "created"):
                del answer[name]
            for name in ("exchange_id", "exchange"):  # ids and times
                answer["choices"][0].pop(name, None)
        assert exchanges[0] == exchanges[1]
        assert answers[0] == answers[1]


async def test_the_time_of_a_request_is_split(tmp_path: Path, tokenizer_dir: Path) -> None:
    engine = FakeEngine(vocab_size=400, delay_s=0.002, max_running=1)
    async with open_bench(tmp_path, tokenizer_dir, engine=engine) as bench:
        bench.resolver.policy = replace(bench.resolver.policy, adapter=None)
        await asyncio.gather(*(bench.chat(user("hi"), seed=seed, max_tokens=10) for seed in (1, 2)))
        first, second = bench.gateway.live.ended
        assert second.queue_s > 5 * first.queue_s
        for ended in (first, second):
            assert 0 < ended.queue_s + ended.prefill_s + ended.decode_s <= ended.total_s


async def test_a_request_that_fails_is_no_longer_running(bench: Bench) -> None:
    bench.engine.error = ProcessError("the engine died\nits log")
    with pytest.raises(ProcessError):
        await bench.chat(user("hi"))
    (ended,) = bench.gateway.live.ended
    assert (ended.outcome, ended.error) == ("failed", "the engine died")
    assert not bench.gateway.live.running


async def test_each_choice_is_a_request_of_its_own(bench: Bench) -> None:
    bench.answers("hello", "world")
    bench.engine.delay_s = 0.01
    asking = asyncio.create_task(bench.chat(user("hi"), n=2))
    while len(bench.gateway.live.running) < 2:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [request.outcome for request in bench.gateway.live.ended] == ["cancelled"] * 2
