"""anthropic: its tool runner, with and without a stream."""

from __future__ import annotations

from typing import Any

import anthropic
from common import KEY, MODEL, QUESTION, URL, main
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


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


main(tools=tools, streamed=streamed)
