"""The Responses and the Anthropic Messages dialect, driven by the real clients: same tokens, same record, same training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from art.errors import ProcessError
from art.gateway.anthropic import MessagesAnswer
from art.gateway.responses import ResponsesAnswer
from art.server.app import App
from art.storage.keys import KeyStore
from tests.support.app import KEY, AppBench, GatewayOnly
from tests.support.gateway import LOOK_UP, user

MODEL = "games/agent"
SCHEMA: Any = LOOK_UP["function"]["parameters"]  # type: ignore[index]
CHAT_TOOL: Any = {
    "type": "function", "function": {"name": "look_up", "description": "find it", "parameters": SCHEMA},
}  # fmt: skip
FLAT_TOOL: Any = {"type": "function", "name": "look_up", "description": "find it", "parameters": SCHEMA, "strict": True}
ANTHROPIC_TOOL: Any = {"name": "look_up", "description": "find it", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'
THOUGHT = "<think>\nhmm\n</think>\n\nlet me see\n"


@pytest.fixture
def oai(app: AppBench, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://art.test/v1", api_key=KEY, max_retries=0, http_client=http)


@pytest.fixture
async def claude(app: AppBench) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app=app.app)
    async with httpx2.AsyncClient(transport=transport) as plain:  # the key comes as `x-api-key` alone
        yield anthropic.AsyncAnthropic(base_url="http://art.test", api_key=KEY, max_retries=0, http_client=plain)


def exchange(app: AppBench, answer: Any) -> Any:
    return app.bench.recorder.get([answer.exchange_id])[0]


# --- the same conversation in three dialects ---


async def talk_chat(oai: openai.AsyncOpenAI) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "be brief"}, user("hi")]
    fields: Any = {"model": MODEL, "tools": [CHAT_TOOL], "temperature": 0.7, "seed": 1}
    first = await oai.chat.completions.create(messages=messages, **fields)
    said = first.choices[0].message
    assert said.tool_calls
    answer = {"role": "assistant", "content": said.content, "tool_calls": [said.tool_calls[0].model_dump()]}
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "found"}
    second = await oai.chat.completions.create(messages=[*messages, answer, result], **fields)
    return [first.choices[0], second.choices[0]]


async def talk_responses(oai: openai.AsyncOpenAI, *, ids: bool = True) -> list[Any]:
    items: list[Any] = [user("hi")]
    fields: Any = {"model": MODEL, "instructions": "be brief", "tools": [FLAT_TOOL], "temperature": 0.7}
    first = await oai.responses.create(input=items, extra_body={"seed": 1}, **fields)
    output = [item.model_dump(exclude_unset=True) for item in first.output]
    if not ids:
        for item in output:
            item.pop("id")
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    second = await oai.responses.create(input=[*items, *output, result], **fields)
    return [first, second]


async def talk_responses_without_ids(oai: openai.AsyncOpenAI) -> list[Any]:
    return await talk_responses(oai, ids=False)


async def talk_previous_response(oai: openai.AsyncOpenAI) -> list[Any]:
    fields: Any = {"model": MODEL, "instructions": "be brief", "tools": [FLAT_TOOL], "temperature": 0.7}
    first = await oai.responses.create(input="hi", **fields)
    call = first.output[-1]
    assert call.type == "function_call"
    items: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"}]
    return [first, await oai.responses.create(input=items, previous_response_id=first.id, **fields)]


async def talk_anthropic(claude: anthropic.AsyncAnthropic) -> list[Any]:
    messages: list[Any] = [user("hi")]
    fields: Any = {"model": MODEL, "system": "be brief", "tools": [ANTHROPIC_TOOL], "max_tokens": 900}
    fields["extra_body"] = {"temperature": 0.7}  # newer clients know no temperature
    first = await claude.messages.create(messages=messages, **fields)
    use = first.content[-1]
    assert use.type == "tool_use"
    result = [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "found"}]}]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": result}]
    return [first, await claude.messages.create(messages=messages, **fields)]


@pytest.mark.parametrize(
    "talk",
    [talk_responses, talk_responses_without_ids, talk_previous_response, talk_anthropic],
    ids=lambda f: f.__name__,
)
async def test_every_dialect_makes_the_same_tokens(
    app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, talk: Any
) -> None:
    app.bench.answers(THOUGHT + CALL, "done")
    expected = [exchange(app, answer) for answer in await talk_chat(oai)]
    app.bench.answers(THOUGHT + CALL, "done")
    made = [exchange(app, answer) for answer in await talk(claude if talk is talk_anthropic else oai)]
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.completion_token_ids == theirs.completion_token_ids
        assert (ours.temperature, ours.branch_reason) == (0.7, None)
    assert made[1].parent_id == made[0].id  # the second turn continues recorded tokens


async def test_a_rollout_may_change_its_dialect_and_is_one_history(
    app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    app.bench.answers("one", "two", "three")
    await oai.with_options(base_url="http://art.test/rollouts/r/v1").responses.create(model=MODEL, input="a")
    turns: list[Any] = [user("a"), {"role": "assistant", "content": "one"}, user("b")]
    rollout = claude.with_options(base_url="http://art.test/rollouts/r")
    await rollout.messages.create(model=MODEL, messages=turns, max_tokens=99)
    turns += [{"role": "assistant", "content": "two"}, user("c")]
    await oai.with_options(base_url="http://art.test/rollouts/r/v1").chat.completions.create(
        model=MODEL, messages=turns
    )
    record = await app.bench.gateway.rollouts.get("r", None)
    items = record.histories[0]["messages_and_choices"]
    assert len(record.histories) == 1
    assert [item["message"]["content"] if "message" in item else item["content"] for item in items] == [
        "a", "one", "b", "two", "c", "three",
    ]  # fmt: skip


# --- Responses ---


async def test_a_response(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(THOUGHT + CALL)
    response = await oai.responses.create(model=MODEL, input="hi", tools=[FLAT_TOOL], metadata={"a": "b"})
    reasoning, _, call = response.output
    made = exchange(app, response)
    stem = made.id.removeprefix("ex_")
    assert [item.id for item in response.output] == [f"rs_{stem}", f"msg_{stem}", f"fc_{stem}_0"]
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "hmm"
    assert response.output_text == "let me see"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.call_id) == ("look_up", {"key": "a b"}, f"call_{stem}_0")
    assert response.usage is not None
    assert response.usage.input_tokens == len(made.prompt_token_ids)
    assert response.usage.output_tokens == len(made.completion_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert (response.status, response.metadata, response.tools[0].strict) == ("completed", {"a": "b"}, False)  # type: ignore[union-attr]
    ResponsesAnswer.model_validate(response.model_dump())


async def test_a_response_that_is_cut_off(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("a rather long answer")
    response = await oai.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    app.bench.answers("")
    empty = await oai.responses.create(model=MODEL, input="hi")
    assert (empty.output_text, len(empty.output)) == ("", 1)


async def test_events_of_a_response(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(THOUGHT + CALL, THOUGHT + CALL)
    whole = await oai.responses.create(model=MODEL, input="hi", tools=[FLAT_TOOL])
    events = [e async for e in await oai.responses.create(model=MODEL, input="hi", tools=[FLAT_TOOL], stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = ("reasoning_text.delta", "output_text.delta")
    assert [kind for i, kind in enumerate(kinds) if kind not in deltas or kinds[i - 1] != kind] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "let me see"
    last = events[-1]
    assert last.type == "response.completed"
    own = {"id", "call_id", "status"}
    assert [item.model_dump(exclude=own) for item in last.response.output] == [
        item.model_dump(exclude=own) for item in whole.output
    ]
    assert last.response.usage == whole.usage
    assert events[0].response.id == last.response.id  # type: ignore[union-attr]


async def test_the_clients_own_stream_helper(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(THOUGHT + CALL)
    async with oai.responses.stream(model=MODEL, input="hi", tools=[FLAT_TOOL]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert (final.output_text, final.status) == ("let me see", "completed")


async def test_an_earlier_response_is_continued_after_a_restart(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one", "two", "three")
    first = await oai.responses.create(model=MODEL, input="a", instructions="be brief")
    app.bench.forget()
    app.bench.gateway.recorder = app.bench.recorder
    second = await oai.responses.create(model=MODEL, input="b", previous_response_id=first.id)
    assert [m["content"] for m in exchange(app, second).request_messages] == ["a", "one", "b"]  # without instructions
    third = await oai.responses.create(model=MODEL, input="c", previous_response_id=second.id)
    assert exchange(app, third).parent_id == exchange(app, second).id
    for unknown in ("resp_1", "resp_" + 26 * "0"):
        with pytest.raises(openai.NotFoundError) as caught:
            await oai.responses.create(model=MODEL, input="c", previous_response_id=unknown)
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(("project", "status"), [("mail", 404), ("games", 200)])
async def test_a_key_of_another_project_continues_no_response(
    app: AppBench, oai: openai.AsyncOpenAI, tmp_path: Path, project: str, status: int
) -> None:
    app.bench.answers("secret", "a", "b")
    made = await oai.responses.create(model=MODEL, input="a")
    with contextlib.closing(KeyStore(tmp_path / "keys.db")) as store:
        _, key = store.create("k", project=project, scopes=["infer"])
        served = App(GatewayOnly(app.bench), api_key=KEY, keys=store)  # type: ignore[arg-type]
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx2.ASGITransport(served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://t", headers=headers) as http:
            for fields in (
                {"input": "b", "previous_response_id": made.id},
                {"input": [user("a"), {"type": "item_reference", "id": made.output[0].id}, user("b")]},
            ):
                answer = await http.post("/v1/responses", json={"model": f"{project}/agent", **fields})
                assert answer.status_code == status, answer.text


async def test_reasoning_comes_back_by_reference(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    """Clients that store nothing send the items back as they were, `encrypted_content` instead of the text."""
    app.bench.answers(THOUGHT, "done")
    fields: Any = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
    first = await oai.responses.create(input="hi", **fields)
    reasoning, message = (item.model_dump(exclude_unset=True) for item in first.output)
    assert reasoning["encrypted_content"] == exchange(app, first).id
    items: Any = [user("hi"), {**reasoning, "content": []}, message, user("more")]
    second = exchange(app, await oai.responses.create(input=items, **fields))
    assert second.request_messages[1]["reasoning_content"] == "hmm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c1"}, "conversation"),
        ({"reasoning": {"unheard_of": 1}}, "reasoning.unheard_of"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0"),
        ({"tools": [FLAT_TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_what_responses_cannot_honour(http: httpx2.AsyncClient, fields: Any, param: str) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": "hi"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_stream_that_breaks_off(
    app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    async def fail(*args: Any, **kwargs: Any) -> None:
        raise ProcessError("the engine is gone")

    app.bench.answers("a b c", "a b c")
    app.bench.gateway.recorder.append = fail  # type: ignore[method-assign]
    stream = await oai.responses.create(model=MODEL, input="hi", stream=True)
    with pytest.raises(openai.APIError, match="the engine is gone"):
        [event async for event in stream]
    events = await claude.messages.create(model=MODEL, messages=[user("hi")], max_tokens=99, stream=True)
    with pytest.raises(anthropic.APIError, match="the engine is gone"):
        [event async for event in events]


# --- Anthropic Messages ---


async def test_a_message(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    app.bench.answers(THOUGHT + CALL)
    message = await claude.messages.create(model=MODEL, messages=[user("hi")], max_tokens=900, tools=[ANTHROPIC_TOOL])
    made = exchange(app, message)
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hmm", made.id)  # type: ignore[union-attr]
    assert (text.type, text.text) == ("text", "let me see")  # type: ignore[union-attr]
    assert (use.type, use.name, use.input) == ("tool_use", "look_up", {"key": "a b"})  # type: ignore[union-attr]
    assert (message.id, message.stop_reason) == (f"msg_{made.id.removeprefix('ex_')}", "tool_use")
    assert message.usage.input_tokens == len(made.prompt_token_ids)
    assert message.usage.output_tokens == len(made.completion_token_ids)
    MessagesAnswer.model_validate(message.model_dump(exclude_unset=True))


async def test_reasons_to_stop(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    async def ask(**fields: Any) -> tuple[str | None, str | None]:
        app.bench.answers(*["one two END three"] * 2)
        body: Any = {"model": MODEL, "messages": [user("hi")], "max_tokens": 99} | fields
        message = await claude.messages.create(**body)
        async with claude.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == (message.stop_reason, message.stop_sequence)
        assert streamed.usage.output_tokens == message.usage.output_tokens
        return message.stop_reason, message.stop_sequence

    assert await ask() == ("end_turn", None)
    assert await ask(max_tokens=3) == ("max_tokens", None)
    assert await ask(stop_sequences=["never", "END"]) == ("stop_sequence", "END")


async def test_events_of_a_message(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    app.bench.answers(THOUGHT + CALL, THOUGHT + CALL)
    fields: Any = {"model": MODEL, "messages": [user("hi")], "max_tokens": 900, "tools": [ANTHROPIC_TOOL]}
    events = [event async for event in await claude.messages.create(stream=True, **fields)]
    kinds = [event.type for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta", "message_stop",
    ]  # fmt: skip
    async with claude.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    made = exchange(app, final)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].signature, final.content[2].input) == (made.id, {"key": "a b"})  # type: ignore[union-attr]
    assert events[0].message.usage.input_tokens == final.usage.input_tokens == len(made.prompt_token_ids)  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"


async def test_tool_errors_and_paragraphs(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    app.bench.answers("done")
    use = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such key", "is_error": True}
    said = [{"type": "text", "text": "try"}, {"type": "text", "text": "again"}]
    messages: Any = [user("hi"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result, *said]}]
    system: Any = [
        {"type": "text", "text": "be"},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
    ]
    made = exchange(
        app,
        await claude.messages.create(
            model=MODEL, messages=messages, system=system, max_tokens=9, tools=[ANTHROPIC_TOOL]
        ),
    )
    assert [(m["role"], m["content"]) for m in made.request_messages] == [
        ("system", "be\n\nbrief"), ("user", "hi"), ("assistant", ""), ("tool", "Error: no such key"), ("user", "try\n\nagain"),
    ]  # fmt: skip


async def test_thinking_is_a_setting_of_the_chat_template(
    app: AppBench, claude: anthropic.AsyncAnthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.bench.answers("a", "b", "c", "d")
    off = "<think>\n\n</think>\n\n"
    fields: Any = {"model": MODEL, "messages": [user("hi")], "max_tokens": 2000}
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    for thinking, ends_off in ((enabled, False), ({"type": "adaptive"}, False), ({"type": "disabled"}, True)):
        message = await claude.messages.create(**fields, thinking=thinking)
        prompt = app.bench.renderer.tokenizer.text(exchange(app, message).prompt_token_ids)
        assert prompt.endswith(off) == ends_off
    own: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    message = await claude.messages.create(**fields, thinking=enabled, extra_body=own)
    assert app.bench.renderer.tokenizer.text(exchange(app, message).prompt_token_ids).endswith(off)
    tokenizer = app.bench.renderer.tokenizer
    monkeypatch.setattr(tokenizer.template, "settings", frozenset())
    monkeypatch.setattr(type(tokenizer), "token_id", lambda self, token: None)
    with pytest.raises(anthropic.BadRequestError, match="this model does not reason"):
        await claude.messages.create(**fields, thinking=enabled)


async def test_counting_tokens(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    app.bench.answers("done")
    fields: Any = {"model": MODEL, "messages": [user("hi " * 50)], "tools": [ANTHROPIC_TOOL], "system": "be brief"}
    count = await claude.messages.count_tokens(**fields)
    message = await claude.messages.create(max_tokens=9, **fields)
    assert count.input_tokens == message.usage.input_tokens
    long = await claude.messages.count_tokens(model=MODEL, messages=[user("word " * 5000)])
    assert long.input_tokens > 4096  # more than the context holds


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"top_k": 5}, "`top_k`"),
        ({"thinking": {"type": "much"}}, "`thinking.type`"),
        ({"thinking": {"type": "enabled", "unheard_of": 1}}, "`thinking.unheard_of`"),
        ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}, "`tool_choice`"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "`tools.0`"),
        ({"stop_sequences": list("abcde")}, "`stop_sequences`"),
        ({"messages": [user("hi"), {"role": "assistant", "content": "I"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "`messages.0.content.0`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages.0.role`"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "`context_management`"),
        ({"max_tokens": None}, "`max_tokens`"),
        ({"unheard_of": 1}, "`unheard_of`"),
    ],
)
async def test_what_messages_cannot_honour(http: httpx2.AsyncClient, fields: Any, part: str) -> None:
    body = {"model": MODEL, "messages": [user("hi")], "max_tokens": 9} | fields
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert part in error["error"]["message"]


async def test_errors_have_the_dialects_shape(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="nobody", messages=[user("hi")], max_tokens=9)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        await claude.with_options(api_key="wrong").messages.create(model=MODEL, messages=[user("hi")], max_tokens=9)
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
