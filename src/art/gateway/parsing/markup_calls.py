"""Readers of formats that put each argument between tags of its own. The values are typed by the tool's schema.

    <function=f> <parameter=key> value </parameter> </function>          Qwen3-Coder, Qwen3.5 and later, Nemotron-3
    f <arg_key>key</arg_key> <arg_value>value</arg_value>                GLM
    <invoke name="f"> <parameter name="key">value</parameter> </invoke>  MiniMax-M2

Nothing in a value is escaped. A value may contain its own closing tag; it ends where that tag is followed by what the
format writes next. A list or an object ends where its JSON ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art.gateway.parsing.calls import Schemas, ToolCall, all_calls, make_call
from art.gateway.parsing.typed_text import kinds_of, typed


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
                end = _DECODER.raw_decode(text, start)[1]
            except (ValueError, RecursionError):
                return self.argument_end.search(text, begin)
            tag = self.argument_end.match(text, _after_space(text, end))
            if tag is not None:
                return tag
        return self.argument_end.search(text, begin)


_DECODER = json.JSONDecoder()
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
