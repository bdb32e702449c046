"""Find out by a trial how a chat template writes tool calls.

Calls are rendered and parsed again. The first format that gives the same calls back is the model's. A template may
write every call, only a single one of a message (Llama 3), or none (Falcon-H1); what it does not write, ART writes into
the message's content, in the format that the template itself describes or writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from art.errors import InvalidRequestError
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.parsing import harmony
from art.gateway.parsing.calls import (
    CallFormat,
    parameter_schemas,
    with_call_ids,
    with_text_arguments,
    with_written_calls,
)
from art.gateway.parsing.parse import MessageParser, TaggedParser, Tags
from art.gateway.parsing.tool_calls import CALL_FORMATS, TAGGED
from art.protocol.chat import Message, Tool, tool_call


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How the tool calls of messages get into a prompt."""

    format: CallFormat
    text_arguments: bool = False
    """Whether the template takes arguments as JSON text. Most take an object."""
    written_from: int | None = None
    """Number of calls in a message from which ART writes them into its content. `None`: the template writes all."""
    is_parallel: bool = True
    """Whether a message may have several calls."""
    end: tuple[str, int] | None = None
    """Text and id of the token that ends an answer with calls, where it is not the usual one."""


def prepare_calls(messages: list[Message], writing: CallWriting) -> list[Message]:
    """Prepare the calls of messages for the template.

    Raises:
        InvalidRequestError: a message has several calls, and the model has no way to write them.
    """
    most = max((len(message.get("tool_calls") or ()) for message in messages), default=0)
    if most > 1 and not writing.is_parallel:
        raise InvalidRequestError(
            f"a message has {most} tool calls, but this model's chat template writes one call per message; send each "
            "call in a message of its own, followed by its result",
            param="messages",
        )
    messages = with_call_ids(messages, writing.format)
    if writing.written_from is not None:
        messages = with_written_calls(messages, writing.format, at_least=writing.written_from)
    return with_text_arguments(messages) if writing.text_arguments else messages


@dataclass(frozen=True, slots=True)
class Side:
    """What a trial needs of a model's renderer."""

    tokenizer: Tokenizer
    tags: Tags
    turn_end: str
    """Text of the token that ends an answer; empty if there is none."""
    render: Callable[[list[Message], list[Tool] | None, bool, CallWriting], str]
    """Renders messages, with the opening of the next answer if the third argument is set."""


_NAME = "zq_probe"
_ASKED: list[Message] = [{"role": "user", "content": "hi"}]
_TYPES = {"zqa": "string", "zqb": "integer", "zqc": "boolean", "zqd": "object"}
_ARGUMENTS = {"zqa": "zq '1'\n\"2\" \\3", "zqb": 2, "zqc": True, "zqd": {"zqe": [1, "2"]}}
_PROPERTIES = {name: {"type": kind, "description": "probe"} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["zqa"]}
_TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": _NAME, "description": "probe", "parameters": _PARAMETERS}}
]


def find_call_writing(side: Side, is_harmony: bool) -> CallWriting | None:
    """Return how calls are written; `None` if no known format reads what the template writes."""
    formats = [TAGGED] if is_harmony else [one for one in CALL_FORMATS if one.is_in(side.tokenizer)]
    for one in formats:
        for text_arguments in (False, True):
            writing = CallWriting(one, text_arguments)
            if _reads_back(side, writing, 1):
                return _with_several(side, replace(writing, end=_find_end(side, writing)))
    if not is_harmony and _leaves_out_calls(side):
        described = _prompt_with_tools(side)
        for one in formats:
            writing = CallWriting(one, written_from=1)
            if one.described_by is not None and one.described_by.search(described) and _reads_back(side, writing, 1):
                return _with_several(side, writing)
    return None


def _with_several(side: Side, writing: CallWriting) -> CallWriting:
    """Find out how several calls of one message are written."""
    if _reads_back(side, writing, 2):
        return writing
    written = replace(writing, written_from=2)
    if writing.format.write is not None and _reads_back(side, written, 2):
        return written
    return replace(writing, is_parallel=False)


def _answer(count: int) -> Message:
    arguments = json.dumps(_ARGUMENTS)
    calls = [tool_call(f"call_zq{number}", _NAME, arguments) for number in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reads_back(side: Side, writing: CallWriting, count: int) -> bool:
    rendered = render_answer(side, writing, [*_ASKED, _answer(count)], _TOOLS)
    if rendered is None:
        return False
    prompt, answer = rendered
    parser = _parser(side, writing.format, prompt)
    parser.push(answer)
    calls = parser.finish().tool_calls
    return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)] * count


def _parser(side: Side, call_format: CallFormat, prompt: list[int]) -> MessageParser:
    if harmony.is_in(side.tokenizer):
        return harmony.HarmonyParser(side.tokenizer, parse_tools=True)
    in_reasoning = side.tags.opens_reasoning(prompt)
    schemas = parameter_schemas(_TOOLS)
    return TaggedParser(side.tokenizer, side.tags, in_reasoning=in_reasoning, schemas=schemas, calls=call_format)


def render_answer(
    side: Side, writing: CallWriting, messages: list[Message], tools: list[Tool]
) -> tuple[list[int], list[int]] | None:
    """Tokens of a prompt, and of its answer (the last message) without the token that ends it.

    Some templates open reasoning in the prompt, and write an answer without reasoning in another way. Such an answer
    is tried with reasoning; then it is cut where the prompt without the opening of the answer ends.

    Returns:
        `None` if the template refuses the messages, or writes them in another way once they are answered.
    """
    asked, answer = messages[:-1], messages[-1]
    try:
        for message in (answer, {**answer, "reasoning_content": "zq thought"}):
            whole = side.render([*asked, message], tools, False, writing)
            prompt = side.render(asked, tools, True, writing)
            if whole.startswith(prompt):
                break
        else:
            prompt = side.render(asked, tools, False, writing)
    except InvalidRequestError:
        return None
    if not whole.startswith(prompt):
        return None
    texts = (prompt, _cut(side, whole[len(prompt) :]))
    first, second = (side.tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return first, second


def _cut(side: Side, answer: str) -> str:
    turn_end = harmony.CALL_END if harmony.is_in(side.tokenizer) else side.turn_end
    end = answer.rfind(turn_end) if turn_end else -1
    return answer if end < 0 else answer[:end]


def _find_end(side: Side, writing: CallWriting) -> tuple[str, int] | None:
    """The token that ends an answer with calls, if the template writes another one than after content."""
    closing = writing.format.closing
    if closing is None or harmony.is_in(side.tokenizer):
        return None
    whole = side.render([*_ASKED, _answer(1)], _TOOLS, False, writing)
    tail = whole[whole.rfind(closing) + len(closing) :].lstrip()
    ids = side.tokenizer.encode(tail, add_special_tokens=False)
    if not ids or ids[0] not in side.tokenizer.backend.get_added_tokens_decoder():
        return None
    text = side.tokenizer.text(ids[:1])
    return None if text == side.turn_end or not tail.startswith(text) else (text, ids[0])


def _leaves_out_calls(side: Side) -> bool:
    """Whether the template renders a message with calls as if it had none."""
    try:
        return _NAME not in side.render([*_ASKED, _answer(1)], None, False, CallWriting(TAGGED))
    except InvalidRequestError:
        return False


def _prompt_with_tools(side: Side) -> str:
    """A prompt with tools, as text."""
    try:
        return side.render(_ASKED, _TOOLS, True, CallWriting(TAGGED))
    except InvalidRequestError:
        return ""
