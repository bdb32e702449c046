"""Prepare the tool calls of messages for a chat template: ids, arguments, and calls that ART writes itself."""

from __future__ import annotations

import json
from typing import Any

from art.gateway.parsing.calls import CallFormat, ToolCall
from art.protocol.chat import Message


def with_call_ids(messages: list[Message], call_format: CallFormat) -> list[Message]:
    """Replace the ids of tool calls by ids that the chat template expects, the same in a call and in its result."""
    make_id = call_format.call_id
    if make_id is None or not any(message.get("tool_calls") for message in messages):
        return messages
    renamed: dict[str, str] = {}
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            named = []
            for call in calls:
                call_id = call.get("id", f"call_{len(renamed)}")
                renamed[call_id] = make_id(call["function"]["name"], len(renamed), call_id)
                named.append({**call, "id": renamed[call_id]})
            message = {**message, "tool_calls": named}
        elif (answered := message.get("tool_call_id")) in renamed:
            message = {**message, "tool_call_id": renamed[answered]}
        result.append(message)
    return result


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Write the arguments of calls as JSON text."""
    return [_with_text_arguments(message) if message.get("tool_calls") else message for message in messages]


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        calls.append({**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}})
    return {**message, "tool_calls": calls}


def with_written_calls(messages: list[Message], call_format: CallFormat, *, at_least: int) -> list[Message]:
    """Write the calls of each message that has `at_least` of them into its content, in a format that has a writer."""
    return [
        _with_written_calls(message, call_format) if len(message.get("tool_calls") or ()) >= at_least else message
        for message in messages
    ]


def _with_written_calls(message: Message, call_format: CallFormat) -> Message:
    assert call_format.write is not None
    functions = [call["function"] for call in message["tool_calls"]]
    written = call_format.write([ToolCall(one["name"], _as_text(one["arguments"])) for one in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{written}" if message.get("content") else written}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
