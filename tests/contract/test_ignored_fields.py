"""Fields that only advise are accepted and reported, and sampling that cannot be trained is replaced where that was set."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from art.config import SamplingConfig
from tests.support.app import KEY, AppBench
from tests.support.gateway import system, user

MODEL = "games/agent"
CHAT, MESSAGES = {"model": MODEL, "messages": [user("hi")]}, {"model": MODEL, "messages": [user("hi")], "max_tokens": 9}
RESPONSES = {"model": MODEL, "input": "hi"}
TOOL = {"name": "look_up", "description": "find it", "input_schema": {"type": "object", "properties": {}}}
ADVICE: Any = [
    ("chat/completions", CHAT, {"reasoning_effort": "high", "verbosity": "low"}, "reasoning_effort, verbosity"),
    ("responses", RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort, reasoning.summary"),
    ("responses", RESPONSES, {"text": {"verbosity": "low"}, "client_metadata": {"a": "b"}},
     "text.verbosity, client_metadata"),
    ("responses", RESPONSES, {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]},
     "tools.web_search, tools.namespace"),
    ("messages", MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    ("messages", MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ("messages", MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
     "context_management"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "fields", "names"), ADVICE)
async def test_advice_is_accepted_and_reported(
    app: AppBench,
    http: httpx2.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: Any,
    fields: Any,
    names: str,
) -> None:
    app.bench.answers("one", "two", "three")
    with caplog.at_level(logging.WARNING):
        for stream in (False, True):
            answer = await http.post(f"/v1/{path}", json={**body, **fields, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-art-ignored"] == names
    assert len([line for line in caplog.messages if "has no effect" in line]) == len(names.split(", "))
    plain = await http.post(f"/v1/{path}", json=body)
    assert "x-art-ignored" not in plain.headers


@pytest.mark.parametrize(("path", "body", "fields", "names"), ADVICE)
async def test_a_strict_server_refuses_advice(
    app: AppBench, http: httpx2.AsyncClient, path: str, body: Any, fields: Any, names: str
) -> None:
    app.app.state.config = app.app.state.config.model_copy(update={"strict": True})
    answer = await http.post(f"/v1/{path}", json={**body, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == names.split(", ")[0]


async def test_a_system_message_keeps_its_place(app: AppBench, http: httpx2.AsyncClient) -> None:
    app.bench.answers("one")
    body = {**MESSAGES, "messages": [user("hi"), {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]}
    answer = await http.post("/v1/messages", json=body)
    made = app.bench.recorder.get([answer.json()["exchange_id"]])[0]
    assert made.request_messages == [user("hi"), system("be brief")]


ASKED = {"temperature": 0, "top_p": 0.5, "frequency_penalty": 0.3}


async def test_the_sampling_of_a_rollout_replaces_what_its_requests_ask_for(
    app: AppBench, http: httpx2.AsyncClient
) -> None:
    app.bench.answers("one")
    path = "/rollouts/r1/v1/chat/completions"
    refused = await http.post(path, json={**CHAT, **ASKED})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "frequency_penalty")
    assert "set `sampling` of the rollout" in refused.text
    put = await http.put("/api/rollouts/r1", json={"model": MODEL, "sampling": {"temperature": 0.5}})
    assert put.json()["sampling"] == {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    answer = await http.post(path, json={**CHAT, **ASKED})
    assert answer.headers["x-art-ignored"] == "temperature, top_p, frequency_penalty"
    made = app.bench.recorder.get([answer.json()["choices"][0]["exchange_id"]])[0]
    assert (made.temperature, made.top_p) == (0.5, 1.0)
    record = (await http.get("/api/rollouts/r1")).json()
    assert record["sampling"]["temperature"] == 0.5


async def test_the_sampling_of_a_model_gives_way_to_that_of_a_rollout(app: AppBench, http: httpx2.AsyncClient) -> None:
    app.bench.answers("one", "two")
    resolver = app.bench.resolver
    resolver.policy = replace(resolver.policy, sampling=SamplingConfig(temperature=1.0))
    await http.put("/api/rollouts/r1", json={"model": MODEL, "sampling": {"temperature": 0.5}})
    temperatures = []
    for base in ("", "/rollouts/r1"):
        answer = await http.post(f"{base}/v1/chat/completions", json={**CHAT, "temperature": 0})
        assert answer.headers["x-art-ignored"] == "temperature"
        temperatures.append(app.bench.recorder.get([answer.json()["choices"][0]["exchange_id"]])[0].temperature)
    assert temperatures == [1.0, 0.5]


@pytest.mark.parametrize(
    ("longest", "said"),
    [
        (4096, "the model's own context of 4096 tokens (`max_position_embeddings`"),
        (262_144, "`max_context` of 4096 tokens (a setting of the model's engine, which is at most 32768 unless you set "
                  "it; the model itself allows 262144)"),
        (None, "`max_context` of 4096 tokens"),
    ],
)  # fmt: skip
async def test_a_long_request_is_told_which_limit_it_meets(
    app: AppBench, http: httpx2.AsyncClient, longest: int | None, said: str
) -> None:
    resolver = app.bench.resolver
    resolver.policy = replace(resolver.policy, longest_context=longest)
    for num_words in (3000, 10_000):
        body = {**CHAT, "messages": [user("hello world " * num_words)]}
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert said in answer.json()["error"]["message"]


async def test_greedy_requests_of_a_trainable_model_warn(
    app: AppBench, http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    app.bench.answers("one", "two", "three")
    with caplog.at_level(logging.WARNING):
        for temperature, remark in (
            (0, "temperature 0 cannot be trained"),
            (0, "temperature 0 cannot be trained"),
            (1, None),
        ):
            answer = await http.post("/v1/chat/completions", json={**CHAT, "temperature": temperature})
            assert answer.headers.get("x-art-remark") == remark
    assert len([line for line in caplog.messages if "temperature 0" in line]) == 1


async def test_an_item_may_be_sent_by_its_id(app: AppBench, http: httpx2.AsyncClient) -> None:
    """The AI SDK does so with the items of answers that it takes for stored."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'
    app.bench.answers(f"<think>\nhmm\n</think>\n\nlet me see\n{call}", "done")
    tool = {"type": "function", "name": "look_up", "parameters": TOOL["input_schema"]}
    oai = openai.AsyncOpenAI(base_url="http://art.test/v1", api_key=KEY, max_retries=0, http_client=http)
    fields: Any = {"model": MODEL, "tools": [tool]}
    first = await oai.responses.create(input="hi", **fields)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "found"}  # type: ignore[union-attr]
    items: Any = [user("hi"), *references, result]
    second: Any = await oai.responses.create(input=items, **fields)
    assert len(references) == 3
    assert app.bench.recorder.get([second.exchange_id])[0].parent_id == first.exchange_id  # type: ignore[attr-defined]
    for unknown in ({"type": "item_reference", "id": "msg_" + 26 * "0"}, {"type": "item_reference"}):
        with pytest.raises(openai.NotFoundError) as caught:
            await oai.responses.create(input=[user("hi"), unknown], **fields)  # type: ignore[list-item]
        assert caught.value.param == "input.1"


async def test_a_name_of_the_assistant_keeps_the_parent(app: AppBench, http: httpx2.AsyncClient) -> None:
    """semantic-kernel sends a call back with a name, and with empty content."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'
    app.bench.answers(call, "done")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": TOOL["input_schema"]}}
    path = "/rollouts/r1/v1/chat/completions"
    first = (await http.post(path, json={**CHAT, "tools": [tool]})).json()["choices"][0]
    said = {
        "role": "assistant", "content": "", "name": "Helper",
        "tool_calls": [{**one, "id": "other"} for one in first["message"]["tool_calls"]],
    }  # fmt: skip
    messages = [user("hi"), said, {"role": "tool", "tool_call_id": "other", "content": "found"}]
    second = (await http.post(path, json={**CHAT, "messages": messages, "tools": [tool]})).json()["choices"][0]
    made = app.bench.recorder.get([second["exchange_id"]])[0]
    assert (made.parent_id, made.branch_reason) == (first["exchange_id"], None)
