"""What the other dialects share: messages built from parts (text, reasoning, tool calls), and the ids of answers.

Each id contains the id of the exchange (the recorded request and answer):

ex_00063f1a2b3c4d5e6f708192a3b4       the exchange
resp_00063f1a2b3c4d5e6f708192a3b4     a response; it ends with `i` if its first message came from `instructions`
msg_... rs_... fc_..._0 call_..._0    a message, reasoning, a function call, the call's own id
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from art.errors import InvalidRequestError
from art.protocol.chat import Message, short, tool_call

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

    @property
    def has_said(self) -> bool:
        return bool(self.texts or self.calls)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        self.calls.append(tool_call(call_id, name, arguments))

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.exchange_id is not None:
            message["exchange_id"] = self.exchange_id
        return message


def join_text(content: Any, where: str, kinds: tuple[str, ...], *, between: str = "") -> str:
    """Join the text of a string, or of a list of parts whose `type` is one of `kinds`.

    Args:
        where: path of `content` in the request, for error messages.

    Raises:
        InvalidRequestError: the content is something else, e.g. an image.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"`{where}` must be text or a list of text parts, got {short(content)}", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r}" if kind else short(part)
            raise InvalidRequestError(
                f"`{where}` has {what}; only text is supported ({', '.join(kinds)})", param=f"{where}.{i}"
            )
        texts.append(part["text"])
    return between.join(texts)


def check_tool_fields(tool: dict[str, Any], known: Iterable[str], where: str) -> None:
    """Check that a tool has no field that the model would not be told of, unless the field says "not used".

    Raises:
        InvalidRequestError: such a field has a value, e.g. `defer_loading` is true.
    """
    for key in sorted(tool.keys() - set(known)):
        value = tool[key]
        is_direct = key == "allowed_callers" and isinstance(value, list) and "direct" in value
        if value is not None and value is not False and not is_direct:
            raise InvalidRequestError(
                f"`{where}.{key}` {short(value)} is not supported: the model sees every tool and calls it directly; "
                "leave it out",
                param=f"{where}.{key}",
            )


def text_field(item: dict[str, Any], key: str, where: str) -> str:
    """Return the required string field `key` of a part of a request.

    Raises:
        InvalidRequestError: the field is missing or not a string.
    """
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"`{where}.{key}` must be a string, got {short(value)}", param=f"{where}.{key}")
    return value
