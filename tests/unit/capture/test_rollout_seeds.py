"""Requests of a rollout carry seeds that follow from the rollout's own, so that it samples the same when it starts again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai

import art
from art.client.rollout_context import RolloutContext, inside_rollout
from art.engine import GenerateRequest
from art.errors import ProcessError
from art.server.call import SEED_HEADER
from tests.support.app import KEY
from tests.support.gateway import user
from tests.support.served_app import ServedApp


def expected(seed: int, count: int) -> list[int | None]:
    context = RolloutContext(model="games/agent", seed=seed)
    return [context.next_seed() for _ in range(count)]


def sampled(served: ServedApp) -> list[tuple[int, bool]]:
    return [(request.seed, request.repeatable) for request in served.app.bench.engine.requests]


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> None:
    await client.chat.completions.create(model="games/agent", messages=[user("x")], **fields)  # type: ignore[list-item]


def ask_blocking(model: art.TrainableModel) -> None:
    model.blocking_openai_client().chat.completions.create(model="games/agent", messages=[user("x")])  # type: ignore[list-item]


async def test_a_rollout_that_starts_again_sends_the_same_seeds(served: ServedApp) -> None:
    for _ in range(2):
        with inside_rollout(RolloutContext(model="games/agent", seed=7)):
            await ask(served.policy.openai_client())
            await asyncio.to_thread(ask_blocking, served.policy)
            await ask(served.policy.openai_client(), stream=True)
    assert sampled(served) == [(seed, False) for seed in expected(7, 3)] * 2
    for _ in range(2):  # outside of a rollout, and in one of another model
        await ask(served.policy.openai_client())
    with inside_rollout(RolloutContext(model="games/other", seed=7)):
        await ask(served.policy.openai_client())
    assert len({seed for seed, _ in sampled(served)}) == 6


async def test_a_retry_has_the_seed_of_its_request(served: ServedApp) -> None:
    engine, calls = served.app.bench.engine, 0

    def script(request: GenerateRequest) -> list[int]:
        nonlocal calls
        calls += 1
        if calls in (1, 2):
            raise ProcessError("the engine died")
        return []

    engine.script = script
    client = served.policy.openai_client()
    with inside_rollout(RolloutContext(model="games/agent", seed=7)):
        await asyncio.gather(*(asyncio.create_task(ask(client)) for _ in range(2)))
        await ask(client)
    seeds = expected(7, 3)
    assert sorted(seed for seed, _ in sampled(served)[:4]) == sorted([*seeds[:2], *seeds[:2]])
    assert [seed for seed, _ in sampled(served)[4:]] == seeds[2:]


async def test_another_library_s_client_sends_them_inside_a_capture(served: ServedApp) -> None:
    served.app.bench.answers("a", "b")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:
        with inside_rollout(RolloutContext(model="games/agent", seed=7)):
            async with art.capture(served.policy) as captured:
                await ask(client)
                await ask(served.policy.openai_client())
    assert [seed for seed, _ in sampled(served)] == expected(7, 2)
    assert len(captured.trajectory.messages_and_choices) == 2


async def test_every_dialect_uses_the_header_and_a_seed_in_the_body_wins(served: ServedApp) -> None:
    bodies: list[tuple[str, dict[str, Any], list[int]]] = [
        ("chat/completions", {"messages": [user("x")], "n": 2}, [5, 6]),
        ("responses", {"input": "x"}, [5]),
        ("messages", {"messages": [user("x")], "max_tokens": 9}, [5]),
    ]
    async with served.app.http() as http:
        for route, body, seeds in bodies:
            served.app.bench.engine.requests.clear()
            answer = await http.post(f"/v1/{route}", json={"model": "games/agent", **body}, headers={SEED_HEADER: "5"})
            assert answer.status_code == 200, answer.text
            assert sorted(sampled(served)) == [(seed, False) for seed in seeds], route
        served.app.bench.engine.requests.clear()
        chat = {"model": "games/agent", "messages": [user("x")], "seed": 9}
        await http.post("/v1/chat/completions", json=chat, headers={SEED_HEADER: "5"})
    assert sampled(served) == [(9, True)]


async def test_a_header_that_is_no_seed_is_refused(served: ServedApp) -> None:
    chat = {"model": "games/agent", "messages": [user("x")]}
    async with served.app.http() as http:
        for text in ("", "-1", "x", "1.5", "0x1", "٣", str(2**63), "1" * 6000):
            headers = [(SEED_HEADER.encode(), text.encode())]
            answer = await http.post("/v1/chat/completions", json=chat, headers=headers)
            assert answer.status_code == 400
            assert (
                "`x-art-seed` must be a whole number from 0 to 9223372036854775807, got"
                in answer.json()["error"]["message"]
            )
            assert len(answer.text) < 500
    assert sampled(served) == []


async def test_the_openapi_document_names_the_header_where_something_is_sampled(served: ServedApp) -> None:
    async with served.app.http() as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    named = {path for path, operations in paths.items() if SEED_HEADER in json.dumps(operations)}
    assert {"/v1/chat/completions", "/projects/{project}/v1/messages", "/v1/responses"} <= named
    assert all(path.endswith(("/chat/completions", "/responses", "/messages")) for path in named)
