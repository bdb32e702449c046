"""What the other chat APIs (Responses, Messages) share: messages built from parts, and the ids of answers.

    request of a dialect --> ChatRequest --> gateway (tokens, record) --> chat answer --> answer of the dialect

The translations are pure functions. The exchange is recorded as if a chat client had made it, so all dialects give the
same prompt tokens, and a conversation may switch between them.

Each id contains the id of the exchange (the recorded request and answer):

ex_00063f1a2b3c4d5e6f708192a3b4       the exchange
resp_00063f1a2b3c4d5e6f708192a3b4     a response; it ends with `i` if its first message came from `instructions`
msg_... rs_... fc_..._0 call_..._0    a message, reasoning, a function call, the call's own id
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from art.protocol.chat import Message, Tool, invalid, short

_ID = re.compile(r"(?:ex|msg|rs|fc|call)_([0-9a-f]{26})(?:_\d+)?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{26})(i?)")


def item_id(kind: str, exchange_id: str, index: int | None = None) -> str:
    """Make the id of a part of an answer, e.g. item_id("fc", "ex_00..", 1) == "fc_00.._1"."""
    name = f"{kind}_{exchange_id.removeprefix('ex_')}"
    return name if index is None else f"{name}_{index}"


def exchange_of(item: object) -> str | None:
    """Return the exchange id inside the id of a part of an answer; `None` for an id that ART did not make."""
    match = _ID.fullmatch(item) if isinstance(item, str) else None
    return f"ex_{match[1]}" if match else None


def response_id(exchange_id: str, *, has_instructions: bool) -> str:
    return item_id("resp", exchange_id) + ("i" if has_instructions else "")


def exchange_of_response(response: str) -> tuple[str, bool] | None:
    """Return the exchange id inside a response id, and whether the first message came from `instructions`."""
    match = _RESPONSE.fullmatch(response)
    return (f"ex_{match[1]}", bool(match[2])) if match else None


class AnswerParts:
    """Collects the parts of one answer (reasoning, text, tool calls) into one chat message."""

    def __init__(self, exchange_id: str | None = None) -> None:
        self.exchange_id = exchange_id
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def ends_before(self, kind: str, exchange_id: str | None) -> bool:
        """Whether an item of this kind and exchange belongs to another answer."""
        if exchange_id is not None and self.exchange_id is not None:
            return exchange_id != self.exchange_id
        return kind != "function_call" and bool(self.texts or self.calls)

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.exchange_id is not None:
            message["exchange_id"] = self.exchange_id
        return message


def read_tool(tool: dict[str, Any], where: str, *, kind: str, schema: str, known: Iterable[str]) -> Tool:
    """Translate a tool of another API, whose type is `kind`, and whose parameters are described in the field `schema`.
    A field that the model would not be told of must say "not used", such as `defer_loading: false`."""
    if tool.get("type") != kind or not isinstance(tool.get("name"), str) or not tool["name"]:
        expected = f'{{"type": "{kind}", "name": ..., "{schema}": ...}}, since ART runs no tools'
        raise invalid(where, f"must be {expected}; got {short(tool)}")
    for key in sorted(tool.keys() - {"type", "name", "description", "strict", schema, *known}):
        value = tool[key]
        is_direct = key == "allowed_callers" and isinstance(value, list) and "direct" in value
        if value is not None and value is not False and not is_direct:
            why = "is not supported: the model sees every tool and calls it directly; leave it out"
            raise invalid(f"{where}.{key}", f"{short(value)} {why}")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def text_field(item: dict[str, Any], key: str, where: str) -> str:
    """Return the field `key` of a part of a request, which must be a string."""
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key}", f"must be a string, got {short(value)}")
    return value
