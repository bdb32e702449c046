"""Readers of formats with a notation of values of their own.

    [f(key='value', more={"x": 1}), g()]              LFM2: the syntax of Python
    call:f{key:<|"|>text<|"|>,more:{x:[1,null]}}       Gemma 4: only strings are in quotation tokens

Later templates of LFM2 escape strings as Python does. Earlier ones write them as they are: such a string ends at a
quotation mark that is followed by the next argument or the end of the call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from art.gateway.parsing.calls import Schemas, ToolCall, all_calls, make_call
from art.gateway.parsing.markup_calls import load_literal

_MAX_TRIES = 100
"""Largest number of places at which the end of one value is tried."""

_STRING = re.compile(r"(['\"])((?:\\.|(?!\1)[^\\])*)\1\s*", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_NAME = re.compile(r"\s*([\w.-]+)\(\s*")
_KEY = re.compile(r"([\w-]+)\s*=\s*")
_VALUE_END = re.compile(r",\s*(?=[\w-]+\s*=)|\)\s*(?:,(?=\s*[\w.-]+\()|\Z)")
"""What follows a value: the next argument, or the end of the call and then the next call or nothing."""


def read_python(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read a list of calls with keyword arguments. Strings are escaped."""
    return _read(text, is_escaped=True)


def read_plain_python(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read a list of calls with keyword arguments. Strings are not escaped."""
    return _read(text, is_escaped=False)


def _read(text: str, *, is_escaped: bool) -> list[ToolCall] | None:
    text = text.strip()
    if not text.startswith("[") or not text.endswith("]"):
        return None
    text, place, calls = text[1:-1].strip(), 0, list[ToolCall | None]()
    while place < len(text):
        if (begin := _NAME.match(text, place)) is None:
            return None
        read = _read_arguments(text, begin.end(), is_escaped)
        if read is None:
            return None
        arguments, place = read
        calls.append(make_call({"name": begin[1], "arguments": arguments}))
    return all_calls(calls)


def _read_arguments(text: str, place: int, is_escaped: bool) -> tuple[dict[str, Any], int] | None:
    """The arguments of a call, and the place after the call."""
    arguments: dict[str, Any] = {}
    if (end := _VALUE_END.match(text, place)) is not None and ")" in end[0]:
        return arguments, end.end()
    while (key := _KEY.match(text, place)) is not None and key[1] not in arguments:
        value = _read_value(text, key.end(), is_escaped)
        if value is None:
            return None
        arguments[key[1]], end = value
        place = end.end()
        if ")" in end[0]:
            return arguments, place
    return None


def _read_value(text: str, place: int, is_escaped: bool) -> tuple[Any, re.Match[str]] | None:
    """The value at `place`, and the match of what follows it: the first place at which the text before is a value."""
    quote = text[place : place + 1]
    if is_escaped and (string := _STRING.match(text, place)) is not None:
        end = _VALUE_END.match(text, string.end())
        return None if end is None else (re.sub(r"\\(.)", _unescape, string[2], flags=re.DOTALL), end)
    for number, end in enumerate(_VALUE_END.finditer(text, place)):
        written = text[place : end.start()].rstrip()
        if quote in ("'", '"'):
            if len(written) > 1 and written.endswith(quote):
                return written[1:-1], end
        elif (value := load_literal(written)) is not None or written in ("None", "null"):
            return value, end
        if number == _MAX_TRIES:
            break
    return None


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[0])


def write_python(calls: list[ToolCall]) -> str:
    """Write calls as LFM2's own later templates do."""
    written = []
    for call in calls:
        arguments = json.loads(call.arguments)
        pairs = ", ".join(f"{key}={_value(value)}" for key, value in arguments.items())
        written.append(f"{call.name}({pairs})")
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _value(value: Any) -> str:
    if isinstance(value, str):
        escaped = re.sub(r"[\\']", r"\\\g<0>", value).replace("\n", "\\n").replace("\r", "\\r")
        return f"'{escaped}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


_QUOTE = '<|"|>'
_CALL = re.compile(r"\s*call:([^{}\s]+)(?=\{)")
_NAME_BEFORE = re.compile(r"\s*([^{}\[\],:<>]+):")
_LITERAL = re.compile(r"\s*([^{}\[\],:<>\s]+)")
_SEPARATOR = re.compile(r"\s*(,?)\s*")


def read_gemma(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read one call."""
    begin = _CALL.match(text)
    if begin is None:
        return None
    try:
        arguments, end = _read_literal(text, begin.end())
    except (_NotInFormatError, RecursionError):
        return None
    if text[end:].strip():
        return None
    return all_calls([make_call({"name": begin[1], "arguments": arguments})])


class _NotInFormatError(Exception):
    """The text at this place is not in the format."""


def _read_literal(text: str, place: int) -> tuple[Any, int]:
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
        elif (match := _NAME_BEFORE.match(text, place)) is not None:
            key, place = match[1], match.end()
        else:
            raise _NotInFormatError
        if key in values:
            raise _NotInFormatError
        values[key], place = _read_literal(text, place)
        place = _after_item(text, place, "}")
    return values, place + 1


def _read_array(text: str, place: int) -> tuple[list[Any], int]:
    values = []
    while not text.startswith("]", place):
        value, place = _read_literal(text, place)
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
