"""How a model's own chat template writes an answer: what surrounds the content, and what surrounds each part of a call.

Nothing is known about families here. Probe messages are rendered, and their parts are found again in the tokens:

    <tool_call> \\n{"name": "  zq_one  ", "arguments":  {"zqa": "zq1", "zqb": "zq2"}  }\\n </tool_call>
    head                       name    middle           arguments                     tail

Two calls in one answer show what the template writes between calls. Ids and numbers of calls become patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from art.errors import ArtError
from art.gateway import harmony
from art.gateway.renderer import Renderer
from art.gateway.tokenizer import Tokenizer
from art.gateway.tool_calls import CALL_FORMATS
from art.protocol.chat import Message, Tool, tool_call


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that differs from answer to answer, as a regular expression."""

    regex: str


Piece: TypeAlias = str | int | Pattern
"""Literal text, the id of a special token, or a pattern."""
Pieces: TypeAlias = tuple[Piece, ...]

_SPECIAL, _PATTERN = 0xF0000, 0x100000
"""Private characters in place of special tokens and patterns while a rendered answer is searched as text."""
_PATTERNS = (r"[0-9]{1,3}", r"[a-zA-Z0-9]{9}", r"[a-zA-Z0-9_]{1,40}")
NUMBER, NINE, ANY_ID = (chr(_PATTERN + i) for i in range(len(_PATTERNS)))


def as_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text in which each special token is one private character."""
    special = tokenizer.backend.get_added_tokens_decoder()
    parts: list[bytes] = [chr(_SPECIAL + i).encode() if i in special else tokenizer.token_bytes[i] for i in ids]
    return b"".join(parts).decode("utf-8", "replace")


def pieces(text: str) -> Pieces:
    """The pieces of a text of `as_text`."""
    result: list[Piece] = []
    for part in re.split(f"([{chr(_SPECIAL)}-{chr(0x10FFFF)}])", text):
        if len(part) == 1 and ord(part) >= _PATTERN:
            result.append(Pattern(_PATTERNS[ord(part) - _PATTERN]))
        elif len(part) == 1 and ord(part) >= _SPECIAL:
            result.append(ord(part) - _SPECIAL)
        elif part:
            result.append(part)
    return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """What surrounds the names and arguments of tool calls."""

    head: Pieces
    """Before the name of the first call."""
    middle: Pieces
    """Between a name and its arguments."""
    between: Pieces | None
    """From the arguments of one call to the name of the next; `None` where an answer has a single call."""
    tail: Pieces
    """After the last arguments."""
    quoted_name: bool
    """Whether names are inside JSON strings."""
    item_separator: str
    key_separator: str
    end: int
    """Token that ends an answer with calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentStyle:
    """What surrounds the content of an answer without calls."""

    head: Pieces
    ends: tuple[int, ...]
    """Tokens of which one ends such an answer."""


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """What surrounds reasoning at the beginning of an answer."""

    before: Pieces
    after: Pieces


Opening = Literal["open", "may", "closed"]
"""Whether a prompt ends inside reasoning, leaves it to the answer to begin with reasoning, or has ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How the model's template writes an answer."""

    content: ContentStyle
    calls: CallStyle | None
    reasoning: ReasoningStyle | None
    whole_pieces: bool = False
    """Whether each token is a whole piece of text, never made of smaller ones. See `Tokenizer.has_whole_pieces`."""


_NAMES = ("zq_one", "zq_two")
_ARGUMENTS = '{"zqa": "zq1", "zqb": "zq2"}'
_WRITTEN = r'\{{"zqa"(?P<key{0}>:\s*)"zq1"(?P<item{0}>,\s*)"zqb"(?P=key{0})"zq2"\}}'
"""The arguments as a regular expression, with groups for the separators. Field 0 numbers the groups."""
_CONTENT = "zq probe zq"
_THOUGHT = "zq thought"
_USER: Message = {"role": "user", "content": "hi"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in ("zqa", "zqb")}}
_FUNCTIONS = [{"name": name, "description": "", "parameters": _PARAMETERS} for name in _NAMES]
_TOOLS: list[Tool] = [{"type": "function", "function": function} for function in _FUNCTIONS]


def answer_tokens(renderer: Renderer, answer: Message, tools: list[Tool] | None) -> list[int] | None:
    """Tokens of an answer as the template writes it, without reasoning. `None` if it does not end with a stop token. A
    template that opens reasoning in every prompt only fits an answer that has reasoning, so both are tried."""
    for message in (answer, {**answer, "reasoning_content": _THOUGHT}):
        try:
            ids = renderer.completion([_USER, message], tools)
        except ArtError:
            continue
        if not ids or ids[-1] not in renderer.stop_token_ids:
            continue
        return _without_reasoning(renderer.tokenizer, ids)
    return _answer_in_history(renderer, answer, tools)


def _answer_in_history(renderer: Renderer, answer: Message, tools: list[Tool] | None) -> list[int] | None:
    """Tokens of an answer that another message follows, for a template that writes answers unlike its prompts.

    Example: prompts end with an empty <think> block, which later prompts do not repeat. The answer begins where they
    differ. It ends with the first stop token, which may also be the beginning of the next message: GLM ends calls with
    `<|observation|>`.
    """
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "zq"}
        for call in answer.get("tool_calls") or ()
    ]
    for then in (results, [_USER]) if results else ([_USER],):
        try:
            prompt, whole = (renderer.render(messages, tools) for messages in ([_USER], [_USER, answer, *then]))
        except ArtError:
            continue
        pairs = enumerate(zip(prompt, whole, strict=False))
        begin = next((i for i, (one, other) in pairs if one != other), len(prompt))
        end = next((i for i in range(begin, len(whole)) if whole[i] in renderer.stop_token_ids), None)
        if end is not None:
            return _without_reasoning(renderer.tokenizer, whole[begin : end + 1])
    return None


def _without_reasoning(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    close = tokenizer.token_id("</think>")
    return ids if close is None or close not in ids else ids[len(ids) - ids[::-1].index(close) :]


def find_style(renderer: Renderer) -> AnswerStyle:
    """Find out how the template of a model writes answers. Renders a few probes."""
    tokenizer, tags = renderer.tokenizer, renderer.tags
    reasoning = None
    if harmony.is_in(tokenizer):
        ids = [tokenizer.token_id(token) for token in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")]
        channel, message, end, start = (i for i in ids if i is not None)
        reasoning = ReasoningStyle((channel, "analysis", message), (end, start, "assistant"))
    elif tags.think_open is not None and tags.think_close is not None:
        reasoning = ReasoningStyle((tags.think_open,), (tags.think_close,))
    answer = answer_tokens(renderer, {"role": "assistant", "content": _CONTENT}, None)
    text = "" if answer is None else as_text(tokenizer, answer[:-1])
    content = ContentStyle(head=(), ends=renderer.stop_token_ids)
    if answer is not None and text.endswith(_CONTENT):
        content = ContentStyle(head=pieces(text.removesuffix(_CONTENT).lstrip()), ends=(answer[-1],))
    calls = _find_call_style(renderer) if renderer.handles_tools else None
    return AnswerStyle(content=content, calls=calls, reasoning=reasoning, whole_pieces=tokenizer.has_whole_pieces)


def opening_of(renderer: Renderer, prompt_ids: list[int]) -> Opening:
    """Find out from the end of a prompt whether its answer is inside reasoning, or may begin with it."""
    openings: dict[int | None, Opening] = dict.fromkeys(renderer.stop_token_ids, "may")  # those end the turn before
    openings |= {renderer.tags.think_close: "closed", renderer.tags.think_open: "open"}
    return next((openings[token] for token in reversed(prompt_ids[-16:]) if token in openings), "may")


def _find_call_style(renderer: Renderer) -> CallStyle | None:
    """What the template writes around calls; `None` if their arguments are not one JSON object."""
    single = _render_calls(renderer, [_ARGUMENTS])
    if single is None:
        return None
    text, end = single
    arguments = _WRITTEN.format(0)
    match = re.fullmatch(rf"(?P<head>.*?){_NAMES[0]}(?P<middle>.*?){arguments}(?P<tail>.*)", text, re.DOTALL)
    if match is None or _NAMES[0] in match["head"] + match["middle"] + match["tail"]:
        return None
    double, between = _render_calls(renderer, [_ARGUMENTS, _ARGUMENTS]), None
    if double is not None and double[1] == end:
        head, middle, tail = (re.escape(match[part]) for part in ("head", "middle", "tail"))
        one, two = (f"{name}{middle}{_WRITTEN.format(i)}" for i, name in enumerate(_NAMES))
        both = re.fullmatch(rf"{head}{one}(?P<between>.*?){two}{tail}", double[0], re.DOTALL)
        between = None if both is None else pieces(both["between"])
    return CallStyle(
        head=pieces(match["head"]), middle=pieces(match["middle"]), between=between, tail=pieces(match["tail"]),
        quoted_name=match["head"].endswith('"'), item_separator=match["item0"], key_separator=match["key0"], end=end,
    )  # fmt: skip


def _render_calls(renderer: Renderer, arguments: Sequence[str]) -> tuple[str, int] | None:
    """An answer with calls as text, its ids and numbers replaced by patterns, and the token that ends it."""
    calls = [tool_call(f"call_zq{i}", _NAMES[i], written) for i, written in enumerate(arguments)]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    ids = answer_tokens(renderer, answer, _TOOLS)
    if ids is None:
        return None
    text = as_text(renderer.tokenizer, ids[:-1])
    for number, call in enumerate(calls):
        name, call_id = call["function"]["name"], call["id"]
        for make_id in (form.call_id for form in CALL_FORMATS if form.call_id is not None):
            written = make_id(name, number, call_id)
            pattern = f"{written.removesuffix(str(number))}{NUMBER}" if name in written else NINE
            text = text.replace(written, pattern)
        text = text.replace(call_id, ANY_ID)
    return text, ids[-1]
