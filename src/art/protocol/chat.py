"""The one form of chat messages and tools, as chat templates see them, whatever dialect a request came in.

Messages stay plain dicts that `normalize_messages` checks, because each request carries the whole conversation and
models would be slow.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

from art.errors import InvalidRequestError
from art.protocol.dialects.json_bounds import JsonBounds

Message: TypeAlias = dict[str, Any]
"""A message as chat templates see it: `role`, `content` (text), and where present `name`, `tool_calls`, `tool_call_id`,
`reasoning_content`, `exchange_id`."""
Tool: TypeAlias = dict[str, Any]
"""A tool: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`."""

MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_VALUES = 64, 100_000
"""Limits of the JSON text in `arguments`, of one tool call and of all in a request."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "exchange_id"}
_IGNORED = {"provider_specific_fields"}
"""Bookkeeping of client libraries that means nothing to the model."""


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Bring chat messages into the one form that the server works with. The input is not changed.

    `developer` becomes `system`, text parts are joined, absent content is the empty string, empty fields are dropped.

    Raises:
        InvalidRequestError: a type is wrong, a role or field is unknown, or content is not text.
    """
    result = [normalize_message(message, f"messages.{i}") for i, message in enumerate(messages)]
    bounds = JsonBounds(
        max_values=MAX_ARGUMENT_VALUES,
        max_depth=MAX_ARGUMENT_DEPTH,
        what="the arguments of all calls",
        param="messages",
    )
    for message in result:
        for call in message.get("tool_calls", ()):
            bounds.feed_text(call["function"]["arguments"])
    return result


def normalize_message(message: Message, where: str = "message") -> Message:
    """Bring one chat message into the form that the server works with. `where` names the message in errors."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"`{where}.role` must be system, developer, user, assistant or tool, got {short(role)}",
            param=f"{where}.role",
        )
    content = message.get("content")
    if not isinstance(content, str):
        content = _join_text(content, where)
    result: Message = {"role": _ROLES[role], "content": content}
    if len(message) == 2 and "content" in message:
        return result
    for key, value in message.items():
        if key not in _KNOWN:
            if value and key not in _IGNORED:
                raise InvalidRequestError(f"`{where}.{key}` is not supported; remove it", param=f"{where}.{key}")
        elif key not in ("role", "content") and value is not None:
            if key == "tool_calls":
                if value:
                    result[key] = _normalize_tool_calls(value, f"{where}.tool_calls")
            elif not isinstance(value, str):
                raise InvalidRequestError(
                    f"`{where}.{key}` must be a string, got {short(value)}", param=f"{where}.{key}"
                )
            else:
                result[key] = value
    return result


def _join_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"`{where}.content` must be text or a list of text parts, got {short(content)}", param=f"{where}.content"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r}" if kind else short(part)
            raise InvalidRequestError(
                f"`{where}.content` has {what}; only text parts are supported", param=f"{where}.content"
            )
        texts.append(part["text"])
    return "".join(texts)


def _normalize_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"`{where}` must be a list, got {short(calls)}", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"`{where}.{i}` must have a `function` with a `name`, got {short(call)}", param=f"{where}.{i}"
            )
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise InvalidRequestError(
                f"`{where}.{i}.function.arguments` must be JSON text, got {short(arguments)}", param=f"{where}.{i}"
            )
        _check_arguments(arguments, f"{where}.{i}.function.arguments")
        clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            clean["id"] = call["id"]
        result.append(clean)
    return result


def _check_arguments(arguments: str, where: str) -> None:
    bounds = JsonBounds(
        max_values=MAX_ARGUMENT_VALUES, max_depth=MAX_ARGUMENT_DEPTH, what=f"the JSON text `{where}`", param=where
    )
    bounds.feed_text(arguments)


_TOLD_FIELDS = ("role", "content", "name", "tool_calls")


def essence(message: Mapping[str, Any]) -> list[Any]:
    """Return what a message says, in a form that is equal for equal messages, however a client writes them.

    Tool-call ids, the spacing of tool-call arguments, reasoning and an assistant's name are left out, since clients
    change, drop or add them.

    Raises:
        InvalidRequestError: this is no message.
    """
    return essence_of_normal(normalize_message({key: message[key] for key in _TOLD_FIELDS if key in message}))


def essence_of_normal(message: Message) -> list[Any]:
    """Return what a message says that `normalize_message` returned; see `essence`."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], _canonical_json(function["arguments"])) for function in functions]
    name = None if message["role"] == "assistant" else message.get("name")
    return [message["role"], message["content"] or "", name, calls]


def _canonical_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (ValueError, RecursionError):
        return text


def message_digest(message: Mapping[str, Any]) -> bytes:
    """Hash what a message says. Raises what `essence` raises."""
    return blake2b(json.dumps(essence(message)).encode(), digest_size=16).digest()


def conversation_digest(messages: Iterable[bytes]) -> str:
    """Hash a conversation, given the digest of each message. A client sends it in place of the texts."""
    return blake2b(b"".join(messages), digest_size=16).hexdigest()


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Make a tool call in OpenAI's form. `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def short(value: Any) -> str:
    """Write a value for an error message, in at most 80 characters. Only the beginning of a large value is read."""
    text = repr(value[:81]) if isinstance(value, str) else _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
