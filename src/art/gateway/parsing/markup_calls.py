"""Readers of formats that put each argument between tags of its own. The values are typed by the tool's schema.

    <function=f> <parameter=key> value </parameter> </function>          Qwen3-Coder, Qwen3.5 and later, Nemotron-3
    f <arg_key>key</arg_key> <arg_value>value</arg_value>                GLM
    <invoke name="f"> <parameter name="key">value</parameter> </invoke>  MiniMax-M2

Nothing in a value is escaped. A value may contain its own closing tag; it ends where that tag is followed by what the
format writes next. A list or an object ends where its JSON ends. Strings are written as they are and other values as
JSON, or as Python's `str` writes them (`True`, `None`, `{'x': [1]}`): only the schema tells "5" from the number 5.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from art.gateway.parsing.calls import DECODER, Schemas, ToolCall, all_calls, make_call, read_float

_MAX_LITERAL_CHARS = 20_000
"""Longest text that is read as a Python literal; `ast` needs much memory for longer ones."""


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of `text`. Text that fits no declared type stays text, so that the tool can complain about it."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    value = load_literal(text)
    is_null = value is None and text.strip() in ("null", "None")
    if not kinds:  # nothing is declared; text in quotation marks is text, since strings are written without them
        return value if is_null or not (value is None or isinstance(value, str)) else text
    if any(_FITS[kind](value) for kind in kinds - {"string", "null"}):
        return value
    return None if "null" in kinds and is_null else text


def load_literal(text: str) -> Any:
    """Decode JSON or a Python literal of JSON's types; `None` for other text, too."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=read_float)
    except (ValueError, RecursionError):
        pass
    if len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FITS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
}


def kinds_of(schema: Mapping[str, Any] | None) -> set[str]:
    """Types that a schema allows; empty if it does not say."""
    if schema is None:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    kinds = {name for name in names if isinstance(name, str) and name in _FITS}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            kinds |= kinds_of(branch) if isinstance(branch, dict) else set()
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
    if not kinds:
        kinds = {kind for value in values for kind, fits in _FITS.items() if fits(value)}
    if kinds and schema.get("nullable") is True:
        kinds.add("null")
    return kinds


@dataclass(frozen=True, slots=True)
class MarkupReader:
    """Reads calls whose parts are found by regular expressions."""

    call: re.Pattern[str]
    """Beginning of a call. Its group is the name."""
    call_end: re.Pattern[str]
    argument: re.Pattern[str]
    """Beginning of an argument. Its group is the key."""
    argument_end: re.Pattern[str]
    own_lines: bool = False
    """Whether a line break separates a value from its tags."""

    def __call__(self, text: str, schemas: Schemas) -> list[ToolCall] | None:
        calls: list[ToolCall | None] = []
        text = text.strip()
        place = 0
        while place < len(text):
            begin = self.call.match(text, place)
            read = None if begin is None else self._read_arguments(text, begin.end(), schemas.get(begin[1], {}))
            if begin is None or read is None:
                return None
            arguments, place = read
            calls.append(make_call({"name": begin[1], "arguments": arguments}))
        return all_calls(calls)

    def _read_arguments(
        self, text: str, place: int, schemas: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], int] | None:
        """Read the arguments from `place` on; return them and where their call ends."""
        arguments: dict[str, Any] = {}
        while True:
            place = _after_space(text, place)
            if (call_end := self.call_end.match(text, place)) is not None:
                return arguments, call_end.end()
            begin = self.argument.match(text, place)
            end = None if begin is None else self._find_end(text, begin.end(), schemas.get(begin[1]))
            if begin is None or end is None or begin[1] in arguments:
                return None
            value = text[begin.end() : end.start()]
            if self.own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[begin[1]] = typed(value, schemas.get(begin[1]))
            place = end.end()

    def _find_end(self, text: str, begin: int, schema: Mapping[str, Any] | None) -> re.Match[str] | None:
        """The end of a value: of its JSON if it is a list or an object, else the first closing tag that can be one."""
        start = _after_space(text, begin)
        if text[start : start + 1] in ("[", "{") and kinds_of(schema) != {"string"}:
            try:
                end = DECODER.raw_decode(text, start)[1]
            except (ValueError, RecursionError):
                return self.argument_end.search(text, begin)
            tag = self.argument_end.match(text, _after_space(text, end))
            if tag is not None:
                return tag
        return self.argument_end.search(text, begin)


_SPACE = re.compile(r"\s*")


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return place if space is None else space.end()


_FUNCTION, _PARAMETER = r"<function=([^>\s]+)>", r"<parameter=([^>\n]+)>"


def _function_reader(*, own_lines: bool) -> MarkupReader:
    call_end = rf"</function>\s*(?={_FUNCTION}|\Z)"
    return MarkupReader(
        call=re.compile(_FUNCTION),
        call_end=re.compile(call_end),
        argument=re.compile(_PARAMETER),
        argument_end=re.compile(rf"</parameter>\s*(?={_PARAMETER}|{call_end})"),
        own_lines=own_lines,
    )


read_functions = _function_reader(own_lines=True)
read_inline_functions = _function_reader(own_lines=False)
read_glm = MarkupReader(
    call=re.compile(r"([^\s<>{}\"]+)\s*"),
    call_end=re.compile(r"\Z"),
    argument=re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>"),
    argument_end=re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)"),
)
_INVOKE, _NAMED = r"<invoke name=\"([^\"\n]+)\">", r"<parameter name=\"([^\"\n]+)\">"
_INVOKE_END = rf"</invoke>\s*(?={_INVOKE}|\Z)"
read_invokes = MarkupReader(
    call=re.compile(_INVOKE),
    call_end=re.compile(_INVOKE_END),
    argument=re.compile(_NAMED),
    argument_end=re.compile(rf"</parameter>\s*(?={_NAMED}|{_INVOKE_END})"),
)
