"""Readers and writers of formats whose arguments are JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from art.gateway.parsing.calls import DECODER, Schemas, ToolCall, all_calls, load_json, make_call


def read_object(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read `{"name": ..., "arguments": {...}}`."""
    return all_calls([make_call(load_json(text))])


def write_tagged(calls: list[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def read_list(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read a JSON list of objects with name and arguments."""
    values = load_json(text)
    return all_calls([make_call(value) for value in values]) if isinstance(values, list) else None


def write_granite(calls: list[ToolCall]) -> str:
    return f"<|tool_call|>[{', '.join(_object(call, 'arguments') for call in calls)}]"


def read_actions(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read Cohere's JSON list of objects with `tool_name` and `parameters`."""
    values = load_json(text)
    if not isinstance(values, list):
        return None
    named = [{**value, "name": value.get("tool_name")} if isinstance(value, dict) else None for value in values]
    return all_calls([make_call(value, "parameters") for value in named])


def read_objects(text: str, _schemas: Schemas) -> list[ToolCall] | None:
    """Read JSON objects with `parameters` (Llama) or `arguments`, one after another, with or without semicolons."""
    decoder, rest, calls = DECODER, text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        is_llama = isinstance(value, dict) and "parameters" in value
        calls.append(make_call(value, "parameters" if is_llama else "arguments"))
        rest = rest[end:].lstrip("; \n")
    return all_calls(calls)


def write_objects(calls: list[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _object(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}}}'


def read_sequence(head: re.Pattern[str], tail: re.Pattern[str]) -> Callable[[str, Schemas], list[ToolCall] | None]:
    """Make a reader of calls that each consist of `head` (whose group is the name), a JSON object, and `tail`."""

    def read(text: str, _schemas: Schemas) -> list[ToolCall] | None:
        decoder, place, calls = DECODER, 0, []
        text = text.strip()
        while place < len(text):
            if (begin := head.match(text, place)) is None:
                return None
            try:
                arguments, place = decoder.raw_decode(text, begin.end())
            except (ValueError, RecursionError):
                return None
            if (end := tail.match(text, place)) is None:
                return None
            calls.append(make_call({"name": begin[1], "arguments": arguments}))
            place = end.end()
        return all_calls(calls)

    return read


read_deepseek = read_sequence(
    re.compile(r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<｜]+?)\s*(?:<｜tool▁sep｜>|\n```json\n)\s*"),
    re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*"),
)
read_kimi = read_sequence(
    re.compile(r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^:\s<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"),
    re.compile(r"\s*<\|tool_call_end\|>\s*"),
)
_read_mistral_names = read_sequence(
    re.compile(r"\s*(?:\[TOOL_CALLS\])?([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]\s*"), re.compile(r"\s*")
)


def read_mistral(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read a JSON list (older tokenizers), or `name[ARGS]{...}` with [TOOL_CALLS] before each further call."""
    return (read_list if text.lstrip().startswith("[{") else _read_mistral_names)(text, schemas)
