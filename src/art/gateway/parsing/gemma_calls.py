"""Reader of Gemma 4's format: `call:f{key:<|"|>text<|"|>,more:{x:[1,null]}}`. Only strings are in quotation tokens."""

from __future__ import annotations

import re
from typing import Any

from art.gateway.parsing.calls import Schemas, ToolCall, all_calls, make_call
from art.gateway.parsing.typed_text import load_literal

_QUOTE = '<|"|>'
_CALL = re.compile(r"\s*call:([^{}\s]+)(?=\{)")
_KEY = re.compile(r"\s*([^{}\[\],:<>]+):")
_LITERAL = re.compile(r"\s*([^{}\[\],:<>\s]+)")
_SEPARATOR = re.compile(r"\s*(,?)\s*")


def read_gemma(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read one call."""
    begin = _CALL.match(text)
    if begin is None:
        return None
    try:
        arguments, end = _read_value(text, begin.end())
    except (_NotInFormatError, RecursionError):
        return None
    if text[end:].strip():
        return None
    return all_calls([make_call({"name": begin[1], "arguments": arguments})])


class _NotInFormatError(Exception):
    """The text at this place is not in the format."""


def _read_value(text: str, place: int) -> tuple[Any, int]:
    """The value at `place`, and the place after it."""
    while text[place : place + 1].isspace():
        place += 1
    if text.startswith(_QUOTE, place):
        return _read_string(text, place)
    if text.startswith("{", place):
        return _read_object(text, place + 1)
    if text.startswith("[", place):
        return _read_array(text, place + 1)
    literal = _LITERAL.match(text, place)
    value = None if literal is None else load_literal(literal[1])
    if literal is None or (value is None and literal[1] not in ("null", "None")):
        raise _NotInFormatError
    return value, literal.end()


def _read_string(text: str, place: int) -> tuple[str, int]:
    begin = place + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise _NotInFormatError
    return text[begin:end], end + len(_QUOTE)


def _read_object(text: str, place: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not text.startswith("}", place):
        key: str
        if text.startswith(_QUOTE, place):
            key, place = _read_string(text, place)
            if not text.startswith(":", place):
                raise _NotInFormatError
            place += 1
        elif (match := _KEY.match(text, place)) is not None:
            key, place = match[1], match.end()
        else:
            raise _NotInFormatError
        if key in values:
            raise _NotInFormatError
        values[key], place = _read_value(text, place)
        place = _after_item(text, place, "}")
    return values, place + 1


def _read_array(text: str, place: int) -> tuple[list[Any], int]:
    values = []
    while not text.startswith("]", place):
        value, place = _read_value(text, place)
        values.append(value)
        place = _after_item(text, place, "]")
    return values, place + 1


def _after_item(text: str, place: int, end: str) -> int:
    """The place of the next item or of `end`."""
    separator = _SEPARATOR.match(text, place)
    assert separator is not None
    if not separator[1] and not text.startswith(end, separator.end()):
        raise _NotInFormatError
    return separator.end()
