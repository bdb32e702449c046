"""Structured answers in the three dialects, streamed and not, driven by the real clients: one form, one record."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel

from tests.support.app import KEY, AppBench
from tests.support.forms import FORMAT, MOVE, TOOLS, is_move, open_form_bench
from tests.support.gateway import user

MODEL = "games/agent"
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS: Any = [{"name": tool["function"]["name"], "input_schema": MOVE} for tool in TOOLS]
FLAT_FORMAT: Any = {"type": "json_schema", "name": "move", "schema": MOVE, "strict": True}


class Move(BaseModel):
    column: Literal["a", "b", "c"]
    row: Literal[1, 2, 3]


@pytest.fixture
async def app(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[AppBench]:
    async with open_form_bench(tmp_path, tokenizer_dir) as bench:
        yield AppBench(bench)


@pytest.fixture
async def claude(app: AppBench) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app.app)) as plain:
        yield anthropic.AsyncAnthropic(base_url="http://art.test", api_key=KEY, max_retries=0, http_client=plain)


def grammar(app: AppBench) -> str:
    """The grammar of the newest exchange, which must be recorded as the engine got it."""
    [(newest,)] = app.bench.database.read("SELECT max(id) FROM exchanges")
    [made] = app.bench.recorder.get([newest])
    assert made.constraint is not None
    assert made.constraint.grammar == app.bench.engine.requests[-1].grammar
    return str(made.constraint.grammar)


async def test_parse_of_the_openai_client(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    for seed in range(3):
        answer = await oai.chat.completions.parse(
            model=MODEL, messages=[user("hi")], response_format=Move, seed=seed  # type: ignore[list-item]
        )  # fmt: skip
        assert isinstance(answer.choices[0].message.parsed, Move)
        response = await oai.responses.parse(model=MODEL, input="hi", text_format=Move, extra_body={"seed": seed})
        assert isinstance(response.output_parsed, Move)
        assert response.output_parsed == answer.choices[0].message.parsed  # the same prompt, grammar and seed


async def test_a_streamed_parse_of_the_openai_client(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    messages: Any = [user("hi")]
    async with oai.chat.completions.stream(model=MODEL, messages=messages, response_format=Move) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Move)
    async with oai.responses.stream(model=MODEL, input="hi", text_format=Move) as events:
        async for _ in events:
            pass
        assert isinstance((await events.get_final_response()).output_parsed, Move)


async def test_parse_of_the_anthropic_client(app: AppBench, claude: anthropic.AsyncAnthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 200, "messages": [user("hi")]}
    message = await claude.messages.parse(output_format=Move, **fields)
    assert isinstance(message.parsed_output, Move)
    assert "%json" in grammar(app)
    async with claude.messages.stream(output_format=Move, **fields) as stream:
        async for _ in stream:
            pass
        assert isinstance((await stream.get_final_message()).parsed_output, Move)


TOOL_CHOICES: list[tuple[Any, Any, Any, set[str]]] = [
    ("required", "required", {"type": "any"}, {"play", "undo"}),
    (
        {"type": "function", "function": {"name": "undo"}}, {"type": "function", "name": "undo"},
        {"type": "tool", "name": "undo"}, {"undo"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "responses", "messages", "names"), TOOL_CHOICES, ids=["any", "named"])
@pytest.mark.parametrize("seed", range(3))
async def test_forced_calls_are_the_same_in_all_dialects(
    app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, seed: int,
    chat: Any, responses: Any, messages: Any, names: set[str],
) -> None:  # fmt: skip
    said: Any = [user("hi")]
    first = await oai.chat.completions.create(
        model=MODEL, messages=said, tools=TOOLS, tool_choice=chat, parallel_tool_calls=False, seed=seed  # type: ignore[arg-type]
    )  # fmt: skip
    assert first.choices[0].finish_reason == "tool_calls"
    [call] = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in names
    assert is_move(json.loads(call.function.arguments))
    text = grammar(app)
    second = await oai.responses.create(
        model=MODEL, input=said, tools=FLAT_TOOLS, tool_choice=responses, parallel_tool_calls=False,
        extra_body={"seed": seed},
    )  # fmt: skip
    [item] = second.output
    assert item.type == "function_call"
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    assert second.parallel_tool_calls is False
    assert grammar(app) == text
    third = await claude.messages.create(
        model=MODEL, max_tokens=200, messages=said, tools=CLAUDE_TOOLS,
        tool_choice={**messages, "disable_parallel_tool_use": True}, extra_body={"seed": seed},
    )  # fmt: skip
    [block] = third.content
    assert (third.stop_reason, block.type) == ("tool_use", "tool_use")
    assert (block.name, block.input) == (call.function.name, json.loads(call.function.arguments))
    assert grammar(app) == text


async def test_streamed_calls(app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    said: Any = [user("hi")]
    tools: Any = TOOLS
    fields: Any = {"model": MODEL, "tool_choice": "required", "parallel_tool_calls": False}
    async with oai.chat.completions.stream(messages=said, tools=tools, **fields) as chat:
        final = await chat.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert all(is_move(json.loads(call.function.arguments)) for call in final.choices[0].message.tool_calls or [])
    async with oai.responses.stream(input=said, tools=FLAT_TOOLS, **fields) as events:
        response = await events.get_final_response()
    assert {item.type for item in response.output} == {"function_call"}
    async with claude.messages.stream(
        model=MODEL,
        max_tokens=500,
        messages=said,
        tools=CLAUDE_TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as blocks:
        message = await blocks.get_final_message()
    assert {block.type for block in message.content} == {"tool_use"}


@pytest.mark.parametrize(
    "extra", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}, {"guided_regex": "yes|no"}]
)
async def test_vllms_fields_in_extra_body(app: AppBench, oai: openai.AsyncOpenAI, extra: dict[str, Any]) -> None:
    said: Any = [user("hi")]
    answer = await oai.chat.completions.create(model=MODEL, messages=said, extra_body=extra)
    assert answer.choices[0].message.content in ("yes", "no")
    response = await oai.responses.create(model=MODEL, input=said, extra_body=extra)
    assert response.output_text in ("yes", "no")


async def test_truncation_in_all_dialects(
    app: AppBench, oai: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    said: Any = [user("hi")]
    extra = {"top_k": 3, "min_p": 0.1}
    await oai.chat.completions.create(model=MODEL, messages=said, max_tokens=4, extra_body=extra)
    await oai.responses.create(model=MODEL, input=said, max_output_tokens=4, extra_body=extra)
    await claude.messages.create(model=MODEL, messages=said, max_tokens=4, extra_body={"top_k": 3})
    assert [(request.top_k, request.min_p) for request in app.bench.engine.requests] == [(3, 0.1), (3, 0.1), (3, 0.0)]


async def test_the_responses_api_repeats_what_was_asked(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    response = await oai.responses.create(model=MODEL, input="hi", text={"format": FLAT_FORMAT})
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert is_move(json.loads(response.output_text))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ("chat/completions", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ("responses", {"text": {"format": "json"}}, "text.format"),
        ("responses", {"text": {"format": {**FLAT_FORMAT, "schema": {"not": {}}}}}, "text.format.schema"),
        ("responses", {"text": {"unheard_of": 1}}, "text.unheard_of"),
        ("responses", {"text": {"format": FLAT_FORMAT}, "guided_choice": ["a"]}, "guided_choice"),
        ("responses", {"tools": [{**FLAT_TOOLS[0], "defer_loading": True}]}, "tools.0.defer_loading"),
        ("responses", {"tools": [{**FLAT_TOOLS[0], "allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"),
        ("responses", {"tools": [{**FLAT_TOOLS[0], "allowed_callers": 1}]}, "tools.0.allowed_callers"),
        ("messages", {"tools": [{**CLAUDE_TOOLS[0], "input_examples": [{}]}]}, "tools.0.input_examples"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"tools": FLAT_TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ("messages", {"output_config": {"unheard_of": 1}}, "output_config.unheard_of"),
        ("messages", {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ("messages", {"output_format": FLAT_FORMAT}, "output_format"),
        ("messages", {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ("messages", {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": {"type": "object", "not": {}}, "strict": True}]},
            "tools.0.function.parameters",
        ),
    ],
)  # fmt: skip
async def test_what_is_refused_names_the_parameter(
    app: AppBench, http: httpx2.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    said = {"input": "hi"} if path == "responses" else {"messages": [user("hi")]}
    limit = {"max_tokens": 9} if path == "messages" else {}
    answer = await http.post(f"/v1/{path}", json={"model": MODEL, **said, **limit, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert app.bench.engine.requests == []
