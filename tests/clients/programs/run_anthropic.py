"""anthropic: its tool runner, with and without a stream, and `parse`."""

from __future__ import annotations

from typing import Any

import anthropic
from common import KEY, MODEL, PARAMETERS, QUESTION, QUESTIONS, URL, Place, main
from common import look_up as find

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
ASKED: Any = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": QUESTION}]}


@anthropic.beta_tool
def look_up(key: str) -> str:
    """Find a value by its key."""
    return find(key)


def tools() -> str:
    return _text(client.beta.messages.tool_runner(tools=[look_up], **ASKED).until_done())


def streamed() -> str:
    pieces: list[str] = []
    for stream in client.beta.messages.tool_runner(tools=[look_up], stream=True, **ASKED):
        pieces = [event.text for event in stream if event.type == "text"]
    return "".join(pieces)


def turns() -> str:
    tool: Any = {"name": "look_up", "input_schema": PARAMETERS}
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.messages.create(model=MODEL, max_tokens=400, messages=messages, tools=[tool])
            messages.append({"role": "assistant", "content": answer.content})
            results = [_result(block) for block in answer.content if block.type == "tool_use"]
            if not results:
                break
            messages.append({"role": "user", "content": results})
    return _text(answer)


def _result(block: Any) -> Any:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": block.id}
    try:
        return result | {"content": find(**block.input)}
    except LookupError as error:
        return result | {"content": str(error), "is_error": True}


def structured() -> Any:
    return client.messages.parse(output_format=Place, **ASKED).parsed_output.model_dump()


def structured_streamed() -> Any:
    with client.messages.stream(output_format=Place, **ASKED) as stream:
        assert len(list(stream.text_stream)) > 1
        return stream.get_final_message().parsed_output.model_dump()


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


main(
    "anthropic",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
