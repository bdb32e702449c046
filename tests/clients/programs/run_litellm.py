"""litellm: completions with a tool and with a class as `response_format`, with and without a stream."""

from __future__ import annotations

import json
import os
from typing import Any

from common import KEY, MODEL, PARAMETERS, QUESTION, QUESTIONS, URL, Place, look_up_or_error, main

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network for prices otherwise
import litellm

TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
USED: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}


def tools() -> str:
    return _loop(lambda messages: litellm.completion(messages=messages, tools=[TOOL], **USED))


def streamed() -> str:
    return _loop(lambda messages: _together(messages, tools=[TOOL]))


def turns() -> str:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = _loop(lambda asked: litellm.completion(messages=asked, tools=[TOOL], **USED), messages)
    return answer


def structured() -> Any:
    completion = litellm.completion(messages=_question(), response_format=Place, **USED)
    return json.loads(completion.choices[0].message.content)


def structured_streamed() -> Any:
    return json.loads(_together(_question(), response_format=Place).choices[0].message.content)


def _loop(ask: Any, messages: list[Any] | None = None) -> str:
    messages = _question() if messages is None else messages
    while True:
        message = ask(messages).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = look_up_or_error(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _together(messages: list[Any], **fields: Any) -> Any:
    chunks = list(litellm.completion(messages=messages, stream=True, **fields, **USED))
    assert len(chunks) > 2
    return litellm.stream_chunk_builder(chunks, messages=messages)


def _question() -> list[Any]:
    return [{"role": "user", "content": QUESTION}]


main(
    "litellm",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
