"""Every answer and every event of a stream is valid in the types of openai-python, which clients may check strictly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.app import AppBench
from tests.support.forms import FORMAT, MOVE, TOOLS, open_form_bench
from tests.support.gateway import user

MODEL = "games/agent"
FLAT_TOOLS: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
ANSWER: TypeAdapter[ChatCompletion] = TypeAdapter(ChatCompletion)
CHUNK: TypeAdapter[ChatCompletionChunk] = TypeAdapter(ChatCompletionChunk)
RESPONSE: TypeAdapter[Response] = TypeAdapter(Response)
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def http(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_form_bench(tmp_path, tokenizer_dir) as bench, AppBench(bench).http() as client:
        yield client


def events(answer: httpx2.Response) -> list[Any]:
    """The events of a stream, of which there must be some."""
    lines = answer.text.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert found, answer.text
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": "required"},
        {"reasoning_effort": None, "verbosity": "medium", "function_call": "none", "functions": []},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
async def test_chat_completions(http: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [user("hi")], "max_tokens": 90, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    ANSWER.validate_python(answer.json())
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in events(await http.post("/v1/chat/completions", json=body | streamed)):
        CHUNK.validate_python(chunk)


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "be brief", "include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "json_schema", "name": "move", "schema": MOVE}}},
        {"tools": FLAT_TOOLS, "tool_choice": "required"},
        {"tools": [{**FLAT_TOOLS[0], "defer_loading": False, "allowed_callers": ["direct"]}]},
        {
            "input": [
                user("hi"), {"type": "function_call", "call_id": "c", "name": "play", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "played"},
            ]
        },
    ],
    ids=["plain", "format", "tools", "fields of tools", "items"],
)  # fmt: skip
async def test_responses(http: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 90, **fields}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    RESPONSE.validate_python(answer.json())
    assert answer.json()["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    for event in events(await http.post("/v1/responses", json=body | {"stream": True})):
        EVENT.validate_python(event)
