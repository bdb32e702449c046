"""Responses that were sampled earlier: read, listed and deleted by OpenAI's client, and prompts that are only counted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from art.gateway.record.conversations import Conversations
from art.gateway.record.retention import forget_older
from art.server.app import App
from art.storage.keys import KeyStore
from tests.support.app import KEY, AppBench, GatewayOnly
from tests.support.gateway import LOOK_UP, user

MODEL = "games/agent"
FLAT_TOOL: Any = {"type": "function", **LOOK_UP["function"], "strict": True}  # type: ignore[dict-item]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'


async def test_a_response_is_read_as_it_was(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("<think>\nhmm\n</think>\n\nlet me see\n" + CALL)
    made = await oai.responses.create(
        model=MODEL, input="hi", instructions="be brief", tools=[FLAT_TOOL], temperature=0.7,
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    app.bench.forget()
    app.bench.gateway.recorder = app.bench.recorder
    read = await oai.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    both = [response.model_dump() for response in (made, read)]
    for response in both:
        assert abs(response.pop("created_at") - time.time()) < 60
        assert abs(response.pop("completed_at") - time.time()) < 60
        assert response["usage"].pop("input_tokens_details")  # what was cached is not recorded
    assert both[0] == both[1]
    assert read.output_text == "let me see"


async def test_what_a_response_answered(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(CALL, "done")
    fields: Any = {"model": MODEL, "tools": [FLAT_TOOL]}
    first = await oai.responses.create(input=[user("hi")], instructions="be brief", **fields)
    call = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}  # type: ignore[union-attr]
    second = await oai.responses.create(input=[result], previous_response_id=first.id, **fields)
    items = [item async for item in oai.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert items[1].call_id == items[2].call_id == call.call_id  # type: ignore[union-attr]
    newest_first = [item async for item in oai.responses.input_items.list(second.id, limit=1)]  # three pages
    assert [item.id for item in newest_first] == [item.id for item in reversed(items)]
    # The items can be sent as input again: they are the same conversation.
    app.bench.answers("again")
    sent: Any = [item.model_dump(exclude_unset=True) for item in items]
    third = await oai.responses.create(input=sent, **fields)
    exchanges = app.bench.recorder.get([r.exchange_id for r in (second, third)])  # type: ignore[attr-defined]
    assert exchanges[0].request_messages == exchanges[1].request_messages


async def test_a_deleted_response_is_gone_and_stays_trainable(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one", "two", "three")
    first = await oai.responses.create(model=MODEL, input="a")
    second = await oai.responses.create(model=MODEL, input="b", previous_response_id=first.id)
    await oai.responses.delete(first.id)
    for attempt in (
        oai.responses.retrieve(first.id), oai.responses.delete(first.id),
        oai.responses.create(model=MODEL, input="c", previous_response_id=first.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await attempt
    third = await oai.responses.create(model=MODEL, input="c", previous_response_id=second.id)
    of = [response.exchange_id for response in (first, second, third)]  # type: ignore[attr-defined]
    assert [exchange.parent_id for exchange in app.bench.recorder.get(of)] == [None, *of[:2]]


async def test_old_deletions_are_forgotten_with_their_exchanges(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one")
    await oai.responses.delete((await oai.responses.create(model=MODEL, input="a")).id)
    recorder = app.bench.recorder
    assert await forget_older(recorder, Conversations(recorder), -60, lambda db: []) == (1, 0)
    assert recorder.database.read("SELECT count(*) FROM deleted_responses")[0][0] == 0


async def test_the_tokens_of_a_prompt_are_counted(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one")
    fields: Any = {"model": MODEL, "input": "hi", "instructions": "be brief", "tools": [FLAT_TOOL]}
    counted = await oai.responses.input_tokens.count(**fields)
    assert app.bench.engine.requests == []
    sampled = await oai.responses.create(**fields)
    assert sampled.usage is not None
    assert (counted.input_tokens, counted.object) == (sampled.usage.input_tokens, "response.input_tokens")


async def test_a_key_of_another_project_sees_no_response(
    app: AppBench, oai: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    app.bench.answers("secret")
    made = await oai.responses.create(model=MODEL, input="a")
    store = KeyStore(tmp_path / "keys.db")
    served = App(GatewayOnly(app.bench), api_key=KEY, keys=store)  # type: ignore[arg-type]
    for project, status in (("mail", 404), ("games", 200)):
        _, key = store.create("k", project=project, scopes=["infer"])
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx2.ASGITransport(served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://t", headers=headers) as http:
            continued = {"model": f"{project}/agent", "input": "b", "previous_response_id": made.id}
            answers = [
                await http.get(f"/v1/responses/{made.id}/input_items"), await http.get(f"/v1/responses/{made.id}"),
                await http.post("/v1/responses/input_tokens", json=continued),
                await http.delete(f"/v1/responses/{made.id}"),
            ]  # fmt: skip
            assert [answer.status_code for answer in answers] == [status] * 4
    store.close()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"), ("?include=message.output_text.logprobs", "include"),
        ("?include[]=message.output_text.logprobs", "include"), ("/input_items?order=up", "order"),
        ("/input_items?limit=0", "limit"), ("/input_items?after=in_1", "after"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_named(
    app: AppBench, oai: openai.AsyncOpenAI, http: httpx2.AsyncClient, query: str, param: str
) -> None:
    app.bench.answers("one")
    made = await oai.responses.create(model=MODEL, input="a")
    answer = await http.get(f"/v1/responses/{made.id}{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
