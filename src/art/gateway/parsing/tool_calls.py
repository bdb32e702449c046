"""The formats in which models write tool calls.

Calls are enclosed by special tokens, or are the whole answer (Llama 3). A model's format is not guessed from its name
or its vocabulary: `format/call_trial.py` picks the one that reads what the model's own template has written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

from art.gateway.parsing.calls import DECODER, CallFormat, Schemas, ToolCall, all_calls, load_json, make_call
from art.gateway.parsing.literal_calls import read_gemma, read_plain_python, read_python, write_python
from art.gateway.parsing.markup_calls import read_functions, read_glm, read_inline_functions, read_invokes
from art.protocol.chat import Message


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


def _mistral_id(_name: str, _number: int, call_id: str) -> str:
    """Make an id of nine letters and digits; Mistral's templates accept no other."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


TAGGED = CallFormat(
    "tagged",
    read_object,
    "<tool_call>",
    "</tool_call>",
    write=write_tagged,
    described_by=re.compile(r"<tool_call>\s*\{"),
)
"""The format of Qwen, Hermes and many other models: one JSON object between `<tool_call>` and `</tool_call>`."""

OBJECTS = CallFormat("objects", read_objects, beginnings=("{", "<|python_tag|>"), write=write_objects)
"""The format of Llama 3. It has no special tokens, so it also reads the text of other formats."""

CALL_FORMATS = (
    TAGGED,
    CallFormat("functions", read_functions, "<tool_call>", "</tool_call>"),
    CallFormat("glm", read_glm, "<tool_call>", "</tool_call>"),
    CallFormat("seed", read_inline_functions, "<seed:tool_call>", "</seed:tool_call>"),
    CallFormat("minimax-m2", read_invokes, "<minimax:tool_call>", "</minimax:tool_call>"),
    CallFormat("mistral", read_mistral, "[TOOL_CALLS]", call_id=_mistral_id),
    CallFormat("deepseek", read_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    CallFormat(
        "kimi",
        read_kimi,
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        call_id=lambda name, number, _id: f"functions.{name}:{number}",
    ),
    CallFormat("phi-4", read_list, "<|tool_call|>", "<|/tool_call|>"),
    CallFormat(
        "granite",
        read_list,
        "<|tool_call|>",
        write=write_granite,
        described_by=re.compile(r"<\|tool_call\|> followed by a JSON list"),
    ),
    CallFormat("cohere", read_actions, "<|START_ACTION|>", "<|END_ACTION|>"),
    CallFormat(
        "lfm2",
        read_python,
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        write=write_python,
        described_by=re.compile("List of tools: "),
    ),
    CallFormat("lfm2-plain", read_plain_python, "<|tool_call_start|>", "<|tool_call_end|>"),
    CallFormat("gemma-4", read_gemma, "<|tool_call>", "<tool_call|>"),
    CallFormat("tool-calls", read_list, "<tool_calls>", "</tool_calls>"),
    CallFormat("toolcall", read_list, "<TOOLCALL>", "</TOOLCALL>"),
    OBJECTS,  # last, since it reads other formats too
)


def has_unread_call(message: Message) -> bool:
    """Whether the content of an answer has the opening of a tool call, i.e. a call that could not be read."""
    content = message.get("content") or ""
    return any(form.opening in content for form in CALL_FORMATS if form.opening is not None)
