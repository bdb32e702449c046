"""The formats in which models write tool calls.

Calls are enclosed by special tokens, or are the whole answer (Llama 3). A model's format is not guessed from its name
or its vocabulary: `format/call_trial.py` picks the one that reads what the model's own template has written.
"""

from __future__ import annotations

import hashlib
import re

from art.gateway.parsing.calls import CallFormat
from art.gateway.parsing.gemma_calls import read_gemma
from art.gateway.parsing.json_calls import (
    read_actions,
    read_deepseek,
    read_kimi,
    read_list,
    read_mistral,
    read_object,
    read_objects,
    write_granite,
    write_objects,
    write_tagged,
)
from art.gateway.parsing.markup_calls import read_functions, read_glm, read_inline_functions, read_invokes
from art.gateway.parsing.python_calls import read_plain_python, read_python, write_python
from art.protocol.chat import Message


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
