"""Tool calls of an answer, what a format of calls consists of, and the calls of messages prepared for a template."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from art.gateway.tokenizer import Tokenizer
from art.protocol.chat import Message, Tool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call."""

    name: str
    arguments: str
    """The arguments as JSON text."""


Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of each parameter, by the function's name and the parameter's name."""
Reader: TypeAlias = Callable[[str, Schemas], list[ToolCall] | None]
"""Reads the calls in the text between the tokens around them; returns `None` for text that is not in the format."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format in which models write tool calls, with the function that reads it."""

    name: str
    read: Reader
    opening: str | None = None
    """Token before the calls; `None` if they are the whole answer, which then begins with one of `beginnings`."""
    closing: str | None = None
    """Token after the calls; `None` if they go on to the end of the answer."""
    beginnings: tuple[str, ...] = ()
    call_id: Callable[[str, int, str], str] | None = None
    """Makes the id that the template expects, from the function's name, the call's number, and ART's own id.

    Calls are numbered over the whole conversation.
    """
    write: Callable[[list[ToolCall]], str] | None = None
    """Writes calls, tags included, for templates that leave out a message's calls or accept only one of them."""
    described_by: re.Pattern[str] | None = None
    """Finds the description of the format in a prompt with tools. Needed where the template leaves out calls."""

    def is_in(self, tokenizer: Tokenizer) -> bool:
        """Whether the vocabulary has the tokens of the format."""
        return all(tokenizer.token_id(tag) is not None for tag in (self.opening, self.closing) if tag is not None)


def parameter_schemas(tools: list[Tool] | None) -> Schemas:
    """Schemas of the parameters of all functions. What is not a schema is left out."""
    schemas: dict[str, dict[str, dict[str, Any]]] = {}
    for function in (tool.get("function") or {} for tool in tools or ()):
        root: Any = function.get("parameters")
        properties = root.get("properties") if isinstance(root, dict) else None
        own = properties.items() if isinstance(properties, dict) else ()
        schemas[function.get("name", "")] = {key: one for key, one in own if isinstance(one, dict)}
    return schemas


def read_float(text: str) -> float:
    """Read a number; one that no float can hold is read as the largest float, since JSON has no infinity."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


DECODER = json.JSONDecoder(parse_float=read_float)


def load_json(text: str) -> Any:
    """Decode JSON; `None` for any other text, and for JSON that is nested too deeply."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def make_call(call: Any, key: str = "arguments") -> ToolCall | None:
    """Make a tool call from a decoded JSON object with a name, and arguments in `key`; `None` for anything else."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    try:
        arguments = call.get(key, {})
        if isinstance(arguments, str):  # some models write the object as a JSON string
            arguments = DECODER.decode(arguments)
        if not isinstance(arguments, dict):
            return None
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + encoded).encode()  # fails on lone surrogates
    except (ValueError, RecursionError):
        return None
    return ToolCall(call["name"], encoded)


def all_calls(calls: list[ToolCall | None]) -> list[ToolCall] | None:
    """The calls; `None` if there is none, or if one of them could not be read."""
    read = [call for call in calls if call is not None]
    return read if read and len(read) == len(calls) else None


def read_calls(
    text: str, begin: re.Pattern[str], read_arguments: Callable[[str, int, str], tuple[Any, int] | None]
) -> list[ToolCall] | None:
    """Read calls one after another; `None` if the text is anything else.

    `begin` matches the beginning of a call, and its group is the name. `read_arguments` takes the text, the place after
    the beginning, and the name. It returns the arguments and the place after the call, or `None`.
    """
    calls: list[ToolCall | None] = []
    text, place = text.strip(), 0
    while place < len(text):
        head = begin.match(text, place)
        read = None if head is None else read_arguments(text, head.end(), head[1])
        if head is None or read is None:
            return None
        arguments, place = read
        calls.append(make_call({"name": head[1], "arguments": arguments}))
    return all_calls(calls)


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


def with_written_calls(messages: list[Message], call_format: CallFormat, *, at_least: int) -> list[Message]:
    """Write the calls of each message that has `at_least` of them into its content, in a format that has a writer."""
    assert call_format.write is not None
    result = []
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if len(functions) >= at_least:
            written = call_format.write([ToolCall(one["name"], one["arguments"]) for one in functions])
            content = f"{message['content']}\n{written}" if message.get("content") else written
            message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
        result.append(message)
    return result
