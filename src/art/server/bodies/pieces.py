"""Decode a large JSON text in pieces, so that other threads run in between.

A decoder holds Python's lock until it has finished, which takes seconds for a body of 60 MiB: in a thread it would stop
the event loop all the same. Here lists and objects are decoded some hundred kB at a time. The result is what
`orjson.loads` returns for the whole text.

    {"groups": [{...}, {...}, ... ]}       the list is longer than a piece: every few groups are decoded together
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

PIECE = 2**18
"""Bytes that are decoded together, if one text is not longer."""
_STRING = rb'"[^"\\]{0,1024}+(?:\\.[^"\\]{0,1024}+){0,64}+"'
_PLAIN = rb'[^\[\]{}"]{0,1024}+'
_FLAT = _PLAIN + rb"(?:" + _STRING + _PLAIN + rb"){0,64}+"
_TOKEN = re.compile(rb"\[" + _FLAT + rb"\]|\{" + _FLAT + rb"\}|" + _STRING + rb'|["\[\]{},]', re.DOTALL)
"""A short list or object without others inside, a short string, or a character of structure."""
_SPACE = b" \t\r\n"
_BACKSLASH = ord("\\")
_CLOSING = {b"[": b"]", b"{": b"}"}


@dataclass(slots=True)
class _Frame:
    """A list or object that has begun."""

    opening: bytes
    begin: int
    """Where its content begins."""
    done: int
    """Up to where its content has been decoded."""
    item: int
    """Where its current item begins: after the last comma."""
    value: Any = None
    """The decoded part, once the content is longer than a piece; `None` while it is decoded with its parent."""
    has_child: bool = False
    """Whether the current item is decoded already, since it was longer than a piece itself."""


def loads(body: bytearray) -> Any:
    """Decode a JSON text.

    Raises:
        orjson.JSONDecodeError: it is not valid JSON.
    """
    if len(body) <= PIECE:
        return orjson.loads(body)
    stack: list[_Frame] = []
    whole: _Frame | None = None
    at = 0
    while (match := _TOKEN.search(body, at)) is not None:
        token, at, end = match[0], match.start(), match.end()
        if whole is not None:
            raise _invalid("unexpected characters after the end", at)
        if token == b'"':
            end = _end_of_string(body, at)
        elif token == b"[" or token == b"{":
            stack.append(_Frame(token, end, end, end))
        elif token == b"," and stack:
            _end_item(body, stack, at)
        elif token == b"]" or token == b"}":
            whole = _close(body, stack, token, at)
        at = end
    if stack:
        raise _invalid("unexpected end of data", at)
    if whole is None or whole.value is None:  # much space around a short value, or a single text
        return orjson.loads(body)
    if body[: whole.begin - 1].strip(_SPACE) or body[whole.done + 1 :].strip(_SPACE):
        raise _invalid("unexpected characters around the value", whole.done)
    return whole.value


def _end_of_string(body: bytearray, at: int) -> int:
    """Where the long string that begins at `at` ends."""
    end = body.find(b'"', at + 1)
    while end >= 0:
        text_end = end
        while body[text_end - 1] == _BACKSLASH:
            text_end -= 1
        if (end - text_end) % 2 == 0:
            return end + 1
        end = body.find(b'"', end + 1)
    raise _invalid("unterminated string", at)


def _close(body: bytearray, stack: list[_Frame], token: bytes, at: int) -> _Frame | None:
    """The innermost list or object ends at `at`. Returns it if it is the whole value."""
    if not stack or _CLOSING[stack[-1].opening] != token:
        raise _invalid("unexpected end of a list or object", at)
    frame = stack.pop()
    if frame.value is not None:
        _decode(body, frame, at)
        frame.done = at
        if stack:
            stack[-1].has_child, stack[-1].done = True, at + 1
    return None if stack else frame


def _end_item(body: bytearray, stack: list[_Frame], at: int) -> None:
    """An item of the innermost list or object ends with a comma at `at`."""
    frame = stack[-1]
    if at - frame.done > PIECE or frame.has_child:
        _open(body, stack, len(stack) - 1)
        _decode(body, frame, at)
        frame.done = at + 1
    frame.item = at + 1


def _open(body: bytearray, stack: list[_Frame], index: int) -> None:
    """Give a list or object a value of its own, in the value of its parent."""
    frame = stack[index]
    if frame.value is not None:
        return
    frame.value = [] if frame.opening == b"[" else {}
    if index == 0:
        return
    _open(body, stack, index - 1)
    parent = stack[index - 1]
    if parent.done < parent.item:  # the items before this one
        _decode(body, parent, parent.item - 1)
        parent.done = parent.item
    before = bytes(body[parent.item : frame.begin - 1])
    if isinstance(parent.value, list):
        if before.strip(_SPACE):
            raise _invalid("unexpected characters before a list or object", parent.item)
        parent.value.append(frame.value)
    else:
        ((key, _),) = orjson.loads(b"{%b null}" % before).items()
        parent.value[key] = frame.value


def _decode(body: bytearray, frame: _Frame, end: int) -> None:
    """Decode the content of a list or object from where it was decoded up to `end`."""
    content = bytes(body[frame.done : end])
    is_blank = not content.strip(_SPACE)
    if frame.has_child:
        frame.has_child = False
        if not is_blank:
            raise _invalid("unexpected characters after a list or object", frame.done)
        return
    if is_blank:
        raise _invalid("a comma without a value", end)
    if isinstance(frame.value, list):
        frame.value += orjson.loads(b"[%b]" % content)
    else:
        frame.value |= orjson.loads(b"{%b}" % content)


def _invalid(what: str, at: int) -> orjson.JSONDecodeError:
    return orjson.JSONDecodeError(f"{what} at byte {at}", "", 0)
