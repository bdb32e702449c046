"""The formats in which models write tool calls, each with the function that reads it.

Calls are enclosed by special tokens, or are the whole answer (Llama 3). A model's format is not guessed from its name:
`template_renderer` picks the one that reads a call back which the model's own chat template has written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from art.gateway.format.tokenizer import Tokenizer
from art.protocol.chat import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call."""

    name: str
    arguments: str
    """The arguments as JSON text."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format in which models write tool calls, with the function that reads it."""

    name: str
    read: Callable[[str], list[ToolCall] | None]
    """Reads the calls in the text between `opening` and `closing`; returns `None` for text not in the format."""
    opening: str | None = None
    """Token before the calls; `None` if they are the whole answer, which then begins with { or <|python_tag|>."""
    closing: str | None = None
    """Token after the calls; `None` if they go on to the end of the answer."""
    call_id: Callable[[str, int, str], str] | None = None
    """Makes the id that the template expects, from the function's name, the call's number, and ART's own id.

    Calls are numbered over the whole conversation.
    """

    def is_in(self, tokenizer: Tokenizer) -> bool:
        """Whether the vocabulary has the tokens of the format."""
        return all(tokenizer.token_id(tag) is not None for tag in (self.opening, self.closing) if tag is not None)


def load_json(text: str) -> Any:
    """Decode JSON; `None` for any other text, and for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_call(text: str) -> ToolCall | None:
    """Read `{"name": ..., "arguments": {...}}`; `None` for anything else."""
    return make_call(load_json(text))


def make_call(call: Any, key: str = "arguments") -> ToolCall | None:
    """Make a tool call from a decoded JSON object with a name, and arguments in `key`; `None` for anything else."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    try:
        arguments = call.get(key, {})
        if isinstance(arguments, str):  # some models write the object as a JSON string
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + encoded).encode()  # fails on lone surrogates
    except (ValueError, RecursionError):
        return None
    return ToolCall(call["name"], encoded)


def _all(calls: list[ToolCall | None]) -> list[ToolCall] | None:
    """The calls if there is at least one and none failed to parse."""
    valid = [call for call in calls if call is not None]
    return valid if valid and len(valid) == len(calls) else None


def _read_list(text: str) -> list[ToolCall] | None:
    """Read a JSON list: `[{"name": ..., "arguments": {...}}, ...]`."""
    values = load_json(text)
    return _all([make_call(value) for value in values]) if isinstance(values, list) else None


def _read_objects(text: str) -> list[ToolCall] | None:
    """Read JSON objects with `parameters` (Llama) or `arguments`, one after another, with or without semicolons."""
    decoder, rest, calls = json.JSONDecoder(), text.strip().removeprefix("<|python_tag|>").strip(), []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        is_llama = isinstance(value, dict) and "parameters" in value
        calls.append(make_call(value, "parameters" if is_llama else "arguments"))
        rest = rest[end:].lstrip("; \n")
    return _all(calls)


def _read_sequence(text: str, head: re.Pattern[str], tail: re.Pattern[str]) -> list[ToolCall] | None:
    """Read calls that each consist of `head` (whose group is the name), a JSON object of arguments, and `tail`."""
    decoder, place, calls = json.JSONDecoder(), 0, []
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
    return _all(calls)


_MISTRAL_HEAD = re.compile(r"\s*(?:\[TOOL_CALLS\])?([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]\s*")
_NOTHING = re.compile(r"\s*")
_DEEPSEEK_HEAD = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<｜]+?)\s*(?:<｜tool▁sep｜>|\n```json\n)\s*"
)
_DEEPSEEK_TAIL = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*")
_KIMI_HEAD = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^:\s<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
)
_KIMI_TAIL = re.compile(r"\s*<\|tool_call_end\|>\s*")


def _read_mistral(text: str) -> list[ToolCall] | None:
    """Read a JSON list (older tokenizers), or `name[ARGS]{...}` with [TOOL_CALLS] before each further call."""
    return _read_list(text) if text.lstrip().startswith("[{") else _read_sequence(text, _MISTRAL_HEAD, _NOTHING)


def _mistral_id(_name: str, _number: int, call_id: str) -> str:
    """Make an id of nine letters and digits; Mistral's templates accept no other."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


TAGGED = CallFormat("tagged", lambda text: _all([parse_call(text)]), "<tool_call>", "</tool_call>")
"""The format of Qwen, Hermes and many other models: one JSON object between `<tool_call>` and `</tool_call>`."""

CALL_FORMATS = (
    TAGGED,
    CallFormat("mistral", _read_mistral, "[TOOL_CALLS]", call_id=_mistral_id),
    CallFormat(
        "deepseek",
        lambda text: _read_sequence(text, _DEEPSEEK_HEAD, _DEEPSEEK_TAIL),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "kimi",
        lambda text: _read_sequence(text, _KIMI_HEAD, _KIMI_TAIL),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        call_id=lambda name, number, _id: f"functions.{name}:{number}",
    ),
    CallFormat("phi-4", _read_list, "<|tool_call|>", "<|/tool_call|>"),
    CallFormat("objects", _read_objects),  # last: it has no special tokens, so it also reads the text of other formats
)


def has_unread_call(message: Message) -> bool:
    """Whether the content of an answer has the opening of a tool call, i.e. a call that could not be read."""
    content = message.get("content") or ""
    return any(form.opening in content for form in CALL_FORMATS if form.opening is not None)


def with_call_ids(messages: list[Message], call_format: CallFormat) -> list[Message]:
    """Replace the ids of tool calls by ids that the chat template expects, the same in a call and in its result."""
    make_id = call_format.call_id
    if make_id is None or not any(message.get("tool_calls") for message in messages):
        return messages
    renamed: dict[str, str] = {}
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            named = []
            for call in calls:
                call_id = call.get("id", f"call_{len(renamed)}")
                renamed[call_id] = make_id(call["function"]["name"], len(renamed), call_id)
                named.append({**call, "id": renamed[call_id]})
            message = {**message, "tool_calls": named}
        elif (answered := message.get("tool_call_id")) in renamed:
            message = {**message, "tool_call_id": renamed[answered]}
        result.append(message)
    return result
