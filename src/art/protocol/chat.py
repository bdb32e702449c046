"""The one form of chat messages and tools, as chat templates see them, whatever dialect a request came in.

Messages stay plain dicts that `normalize_messages` checks, because each request carries the whole conversation and
models would be slow.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeAlias

from art.errors import InvalidRequestError

Message: TypeAlias = dict[str, Any]
"""A message as chat templates see it: `role`, `content` (text), and where present `name`, `tool_calls`, `tool_call_id`,
`reasoning_content`, `exchange_id`."""
Tool: TypeAlias = dict[str, Any]
"""A tool: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`."""

_STEP = 2**16
"""Bytes that are looked at in one go. Each go takes less than 2 ms, whatever they are."""
_OPEN, _CLOSE = b"[{", b"]}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _OPEN + _CLOSE)
_RISE = [(byte in _OPEN) - (byte in _CLOSE) for byte in range(256)]


class JsonBounds:
    """Limits for one JSON text: counts its values and its depth before anything is built from it.

    A body of 60 MiB can hold 20 million empty lists, for which Python needs gigabytes and half a minute, during which
    no other request is answered. The text itself is cheap to look at, and it may come in pieces. Whether it is valid
    JSON is not checked.
    """

    def __init__(self, *, max_values: int, max_depth: int, what: str, param: str | None = None) -> None:
        """`what` names the text in errors, and `param` the parameter at fault."""
        self._max_values, self._max_depth, self._what, self._param = max_values, max_depth, what, param
        self.num_values = 0
        """Lists, objects and commas so far, which is at least the number of values that are not empty containers."""
        self._num_quotes = 0
        self._depth = 0
        self._in_string = 0
        self._rest = b""
        """A backslash at the end of the last piece, which belongs to the next character."""

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Look at the next piece of the text. Too many values, or too many levels, are an `InvalidRequestError`."""
        for start in range(0, len(piece), _STEP):
            self._look_at(bytes(piece[start : start + _STEP]))

    def _look_at(self, text: bytes) -> None:
        text = self._rest + text
        self._rest = b""
        if b"\\" in text:  # what is left of an escape is at most its letter, so each quote left begins or ends a string
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
            if text.endswith(b"\\"):
                text, self._rest = text[:-1], b"\\"
        parts = text.split(b'"')
        outside = b" ".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) & 1
        self._num_quotes += len(parts) - 1
        brackets = outside.translate(None, _NOT_BRACKETS)
        if brackets:
            depths = list(accumulate(map(_RISE.__getitem__, brackets), initial=self._depth))
            self._depth = depths[-1]
            if max(depths) > self._max_depth:
                problem = f"{self._what} has more than {self._max_depth} lists and objects inside one another"
                raise InvalidRequestError(problem, param=self._param)
            self.num_values += brackets.count(b"[") + brackets.count(b"{")
        self.num_values += outside.count(b",")
        # A value has two texts at most, its key and itself, so more of them are not valid JSON.
        if self.num_values > self._max_values or self._num_quotes > 4 * (self._max_values + 1):
            problem = f"{self._what} has more than {self._max_values} values; send less at a time"
            raise InvalidRequestError(problem, param=self._param)


MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_VALUES = 64, 100_000
"""Limits of the JSON text in `arguments`, of one tool call and of all in a request."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "exchange_id"}
_IGNORED = {"provider_specific_fields"}
"""Bookkeeping of client libraries that means nothing to the model."""


def invalid(param: str, problem: str) -> InvalidRequestError:
    """The error for a parameter that is wrong, such as invalid("stop", "takes at most 4 strings")."""
    return InvalidRequestError(f"`{param}` {problem}", param=param)


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Bring chat messages into the one form that the server works with. The input is not changed. `developer` becomes
    `system`, text parts are joined, absent content is the empty string, empty fields are dropped. Raises
    `InvalidRequestError` if a type is wrong, a role or field is unknown, or content is not text."""
    result = [normalize_message(message, f"messages.{i}") for i, message in enumerate(messages)]
    num_values = 0
    for i, message in enumerate(result):
        for j, call in enumerate(message.get("tool_calls", ())):
            where = f"messages.{i}.tool_calls.{j}.function.arguments"
            what = f"the JSON text `{where}`"
            bounds = JsonBounds(max_values=MAX_ARGUMENT_VALUES, max_depth=MAX_ARGUMENT_DEPTH, what=what, param=where)
            bounds.feed(call["function"]["arguments"].encode("utf-8", "surrogatepass"))
            num_values += bounds.num_values
            if num_values > MAX_ARGUMENT_VALUES:
                problem = f"the arguments of all calls have more than {MAX_ARGUMENT_VALUES} values; send less at a time"
                raise InvalidRequestError(problem, param="messages")
    return result


def normalize_message(message: Message, where: str = "message") -> Message:
    """Bring one chat message into the form that the server works with. `where` names the message in errors."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        expected = "system, developer, user, assistant or tool"
        raise invalid(f"{where}.role", f"must be {expected}, got {short(role)}")
    content = message.get("content")
    if not isinstance(content, str):
        content = join_text(content, f"{where}.content", ("text",))
    result: Message = {"role": _ROLES[role], "content": content}
    if len(message) == 2 and "content" in message:
        return result
    for key, value in message.items():
        if key not in _KNOWN:
            if value and key not in _IGNORED:
                raise invalid(f"{where}.{key}", "is not supported; remove it")
        elif key not in ("role", "content") and value is not None:
            if key == "tool_calls":
                if value:
                    result[key] = _normalize_tool_calls(value, f"{where}.tool_calls")
            elif not isinstance(value, str):
                raise invalid(f"{where}.{key}", f"must be a string, got {short(value)}")
            else:
                result[key] = value
    return result


def join_text(content: Any, where: str, kinds: tuple[str, ...], *, between: str = "") -> str:
    """Join the text of a string, or of a list of parts whose `type` is one of `kinds`. Anything else, e.g. an image, is
    an `InvalidRequestError` that names it by `where`, its path in the request."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise invalid(where, f"must be text or a list of text parts, got {short(content)}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r}" if kind else short(part)
            problem = f"`{where}` has {what}; only text is supported ({', '.join(kinds)})"
            raise InvalidRequestError(problem, param=f"{where}.{i}")
        texts.append(part["text"])
    return between.join(texts)


def _normalize_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(where, f"must be a list, got {short(calls)}")
    result = []
    for i, call in enumerate(calls):
        at = f"{where}.{i}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(at, f"must have a `function` with a `name`, got {short(call)}")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise InvalidRequestError(f"`{at}.function.arguments` must be JSON text, got {short(arguments)}", param=at)
        clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            clean["id"] = call["id"]
        result.append(clean)
    return result


_TOLD_FIELDS = ("role", "content", "name", "tool_calls")


def essence(message: Mapping[str, Any]) -> list[Any]:
    """Return what a message says, in a form that is equal for equal messages, however a client writes them. Tool-call
    ids, the spacing of tool-call arguments, reasoning and an assistant's name are left out, since clients change, drop
    or add them. Raises `InvalidRequestError` if this is no message."""
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
