"""Tool calls of an answer, what a format of calls consists of, and the calls of messages prepared for a template."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from art.gateway.format.tokenizer import Tokenizer
from art.protocol.chat import Message, Tool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call."""

    name: str
    arguments: str
    """The arguments as JSON text."""


Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of each parameter, by the function's name and the parameter's name."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format in which models write tool calls, with the function that reads it."""

    name: str
    read: Callable[[str, Schemas], list[ToolCall] | None]
    """Reads the calls in the text between `opening` and `closing`; returns `None` for text not in the format."""
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


_MAX_REFERENCES = 256
"""Largest number of references that are followed in the schemas of a function."""


def parameter_schemas(tools: list[Tool] | None) -> Schemas:
    """Schemas of the parameters of all functions, see `property_schemas`."""
    functions = [tool.get("function") or {} for tool in tools or ()]
    return {function.get("name", ""): property_schemas(function.get("parameters")) for function in functions}


def property_schemas(parameters: Any) -> dict[str, dict[str, Any]]:
    """Schemas of a function's parameters, without references at their top. What is not a schema is left out."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    left = [_MAX_REFERENCES]
    return {key: _resolved(one, parameters, left) for key, one in properties.items() if isinstance(one, dict)}


def _resolved(schema: dict[str, Any], root: dict[str, Any], left: list[int]) -> dict[str, Any]:
    """A schema in which references to definitions of `root`, also those of branches, are replaced by what they name."""
    while (target := _target(schema, root)) is not None and left[0] > 0:
        left[0] -= 1
        schema = {**target, **{key: value for key, value in schema.items() if key not in ("$ref", "allOf")}}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            schema = {**schema, key: [_resolved(one, root, left) for one in schema[key] if isinstance(one, dict)]}
    return schema


def _target(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any] | None:
    """What the reference of a schema names, or the only branch of its `allOf`."""
    branches = schema.get("allOf")
    if isinstance(branches, list) and len(branches) == 1:
        return branches[0] if isinstance(branches[0], dict) else None
    path = str(schema.get("$ref", "")).split("/")
    if len(path) != 3 or path[0] != "#" or path[1] not in ("$defs", "definitions"):
        return None
    definitions = root.get(path[1])
    target = definitions.get(path[2]) if isinstance(definitions, dict) else None
    return target if isinstance(target, dict) else None


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
