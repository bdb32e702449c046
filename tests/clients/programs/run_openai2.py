"""openai-python 2: chat completions, with and without a stream, and `.parse`."""

from __future__ import annotations

import json
from typing import Any

import openai
from common import KEY, MODEL, PARAMETERS, QUESTION, URL, Place, look_up, main

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS, "strict": True}}
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def tools() -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = look_up(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def streamed() -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return "".join(pieces)
        for call in message.tool_calls:
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def structured() -> Any:
    return _found(client.chat.completions.parse(response_format=Place, **ASKED))


def structured_streamed() -> Any:
    with client.chat.completions.stream(response_format=Place, **ASKED) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.delta"]
        assert len(parsed) > 1
        return _found(stream.get_final_completion())


def _found(completion: Any) -> Any:
    return completion.choices[0].message.parsed.model_dump()


main("openai", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
