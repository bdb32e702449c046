"""Readers of formats that put each argument between tags of its own. The values are typed by the tool's schema.

    <function=f> <parameter=key> value </parameter> </function>          Qwen3-Coder, Qwen3.5 and later, Nemotron-3
    f <arg_key>key</arg_key> <arg_value>value</arg_value>                GLM
    <invoke name="f"> <parameter name="key">value</parameter> </invoke>  MiniMax-M2

Nothing in a value is escaped. A value may contain its own closing tag; it ends where that tag is followed by what the
format writes next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art.gateway.parsing.calls import Schemas, ToolCall, all_calls, make_call
from art.gateway.parsing.typed_text import typed


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
            end = None if begin is None else self.call_end.search(text, begin.end())
            if begin is None or end is None:
                return None
            arguments = self._read_arguments(text[begin.end() : end.start()], schemas.get(begin[1], {}))
            calls.append(None if arguments is None else make_call({"name": begin[1], "arguments": arguments}))
            place = end.end()
        return all_calls(calls)

    def _read_arguments(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        arguments: dict[str, Any] = {}
        text = text.strip()
        place = 0
        while place < len(text):
            begin = self.argument.match(text, place)
            end = None if begin is None else self.argument_end.search(text, begin.end())
            if begin is None or end is None or begin[1] in arguments:
                return None
            value = text[begin.end() : end.start()]
            if self.own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[begin[1]] = typed(value, schemas.get(begin[1]))
            place = end.end()
        return arguments


_FUNCTION, _PARAMETER = r"<function=([^>\s]+)>", r"<parameter=([^>\n]+)>"


def _function_reader(*, own_lines: bool) -> MarkupReader:
    return MarkupReader(
        call=re.compile(_FUNCTION),
        call_end=re.compile(rf"</function>\s*(?={_FUNCTION}|\Z)"),
        argument=re.compile(_PARAMETER),
        argument_end=re.compile(rf"</parameter>\s*(?={_PARAMETER}|\Z)"),
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
read_invokes = MarkupReader(
    call=re.compile(_INVOKE),
    call_end=re.compile(rf"</invoke>\s*(?={_INVOKE}|\Z)"),
    argument=re.compile(_NAMED),
    argument_end=re.compile(rf"</parameter>\s*(?={_NAMED}|\Z)"),
)
