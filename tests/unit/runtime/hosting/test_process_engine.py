"""The handle goes on where a dead engine stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from art.engine import GenerateRequest, TokenChunk, only_chunk
from art.errors import InvalidRequestError, ProcessError
from art.protocol.calls import Call, Generate
from art.runtime.hosting.process_engine import ProcessEngine
from tests.support.fake_engine import FakeEngine

ATTEMPTS = 4

REQUEST = GenerateRequest(
    request_id="r", adapter=None, prompt_token_ids=[5, 9], max_tokens=20, stop_token_ids=(), seed=11
)


class MortalClient:
    """A connection to a fake engine that dies after `lives[i]` results of its i-th call."""

    def __init__(self, lives: list[int | None]) -> None:
        self.engine = FakeEngine()
        self.lives = lives
        self.calls: list[Call[Any]] = []

    async def stream(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        self.calls.append(call)
        left = self.lives.pop(0)
        if left == 0:
            raise ProcessError("gone")
        async with aclosing(self.engine.generate(call.request, stream=call.stream)) as chunks:
            async for chunk in chunks:
                yield chunk
                if left is not None and (left := left - 1) == 0:
                    raise ProcessError("gone")

    async def call(self, call: Call[Any]) -> Any:
        if isinstance(call, Generate):
            return await only_chunk(self.stream(call))
        self.calls.append(call)
        if self.lives.pop(0) == 0:
            raise ProcessError("gone")
        return [-1.0]


def handle(*lives: int | None) -> tuple[ProcessEngine, MortalClient]:
    client = MortalClient(list(lives))

    async def connect() -> Any:
        return client

    return ProcessEngine(connect, ATTEMPTS), client


async def collect(engine: Any, request: GenerateRequest = REQUEST, *, stream: bool = True) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request, stream=stream)]


@pytest.mark.parametrize("lives", [(None,), (1, None), (7, 5, None), (0, 3, 0, None)])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_completion_is_the_one_that_would_have_come(lives: tuple[int | None, ...], stream: bool) -> None:
    if not stream:
        lives = tuple(0 if life is not None else None for life in lives)
    engine, client = handle(*lives)
    got = await collect(engine, stream=stream)
    want = await collect(FakeEngine(), stream=stream)
    assert [t for c in got for t in c.token_ids] == [t for c in want for t in c.token_ids]
    assert [lp for c in got for lp in c.logprobs] == [lp for c in want for lp in c.logprobs]
    assert got[-1].finish_reason == "length"
    assert len(client.calls) == len(lives)


@pytest.mark.parametrize("lives", [(None,), (0, 0, None)])
async def test_a_whole_answer_is_asked_for_again(lives: tuple[int | None, ...]) -> None:
    engine, client = handle(*lives)
    got = await engine.generate_whole(REQUEST)
    want = await FakeEngine().generate_whole(REQUEST)
    assert (got.token_ids, got.logprobs, got.finish_reason) == (want.token_ids, want.logprobs, "length")
    assert len(client.calls) == len(lives)
    assert (got.timings is None) == (len(lives) > 1), "the times of a second attempt leave out the first one"


async def test_a_request_is_made_as_often_as_the_policy_says() -> None:
    engine, client = handle(*[0] * 10)
    with pytest.raises(ProcessError):
        await collect(engine)
    assert len(client.calls) == ATTEMPTS


async def test_other_errors_are_not_repeated() -> None:
    engine, client = handle(None, None)
    bad = GenerateRequest(**{name: getattr(REQUEST, name) for name in REQUEST.__slots__} | {"max_tokens": 0})
    with pytest.raises(InvalidRequestError):
        await collect(engine, bad)
    assert len(client.calls) == 1


async def test_other_calls_are_repeated() -> None:
    engine, client = handle(0, 0, None)
    assert await engine.score([1, 2], None) == [-1.0]
    assert len(client.calls) == 3
