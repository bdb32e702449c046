"""One grammar for a whole answer: optional reasoning, then tool calls in the model's own format, or content in a form.

    start: reasoning BREAK calls | calls
    reasoning: <[151667]> TEXT? <[151668]>
    calls: <[151657]> "\\n{\\"name\\": \\"" call "}\\n" <[151658]>
    call: "look_up" "\\", \\"arguments\\": " %json {...}

What surrounds names and arguments is what the chat template writes (`style.py`). The token that ends an answer is not
part of its grammar: it is named beside it. The text is Lark of llguidance, in which special tokens are always tokens by
id: text never matches a special token, even where it looks like one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from art.gateway.answer_style import AnswerStyle, Opening, Pattern, Piece, Pieces
from art.protocol.chat_completions import CallRule, ContentForm

TEXT = r"/(.|\n)+/"
"""Any text without special tokens."""
FREE_TOKENS = '%llguidance {"no_forcing": true}\n'
"""Line with which a model writes text that it has no choice about in tokens of its own choice.

Without it, llguidance forces the tokens into which it cuts such text. That is what a model writes anyway if its tokens
are merged from smaller ones. It is not where a token is a whole phrase that is longer than the forced text.
"""


def literal(text: str) -> str:
    return json.dumps(text)


def piece(part: Piece) -> str:
    if isinstance(part, int):
        return f"<[{part}]>"
    return regex(part.regex) if isinstance(part, Pattern) else literal(part)


def sequence(parts: Pieces) -> str:
    return " ".join(map(piece, parts))


def choice(texts: list[str]) -> str:
    return " | ".join(map(literal, dict.fromkeys(texts)))


def schema(value: dict[str, Any], separators: tuple[str, str]) -> str:
    """JSON that matches a schema, with fixed white space. `separators` are between items, and after a key."""
    item, key = separators
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return f"%json {json.dumps({**value, 'x-guidance': options})}"


def regex(pattern: str) -> str:
    """A regular expression. It must match the whole text, with or without ^ and $ at its ends."""

    def on_one_line(match: re.Match[str]) -> str:  # a character or an escape, as it may be between slashes on one line
        part = match[0]
        if not part[-1].isprintable():
            return f"\\x{{{ord(part[-1]):x}}}"
        return r"\/" if part == "/" else part

    return "/" + re.sub(r"(?s)\\.|.", on_one_line, pattern) + "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What an answer must look like."""

    opening: Opening
    form: ContentForm | None = None
    """Form of the content of an answer without calls."""
    rule: CallRule = field(default_factory=lambda: CallRule("none"))
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Schema of the arguments of each function that may be called."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar, and the tokens of which one ends the answer."""

    text: str
    stop_token_ids: tuple[int, ...]


def write_grammar(style: AnswerStyle, shape: AnswerShape) -> AnswerGrammar:
    """Write the grammar of an answer: reasoning as far as the prompt allows it, then calls, content, or either. Calls
    need a style that has them."""
    calls = style.calls if shape.rule.mode != "none" else None
    separators = (", ", ": ") if calls is None else (calls.item_separator, calls.key_separator)
    rules: dict[str, str] = {}
    bodies: list[str] = []
    """Alternatives of the answer after its reasoning."""
    ends: list[int] = []
    leading, head = ("", ()) if calls is None else _split_leading(calls.head)
    if calls is not None:
        for i, name in enumerate(shape.arguments):
            written = literal(json.dumps(name)[1:-1] if calls.quoted_name else name)
            rules[f"call_{i}"] = _join(written, sequence(calls.middle), schema(shape.arguments[name], separators))
        rules["call"] = " | ".join(f"call_{i}" for i in range(len(shape.arguments)))
        more = "" if calls.between is None or shape.rule.single else f"({sequence(calls.between)} call)*"
        rules["calls"] = _join(sequence(head), "call", more, sequence(calls.tail))
        bodies.append("calls")
        ends.append(calls.end)
    if shape.form is not None and shape.rule.mode != "required":
        kind, value = shape.form.kind, shape.form.value
        if kind == "json":
            rules["form"] = schema(value, separators)
        else:
            rules["form"] = choice(value) if kind == "choice" else regex(value)
        bodies.append(_join(sequence(style.content.head), "form"))
        ends += style.content.ends
    elif shape.rule.mode == "auto":
        # A model may write text beside calls. Calls may follow it where they begin with a special token. Otherwise text
        # is what does not begin like a call.
        if style.content.head or not isinstance(head[0], int):
            free = TEXT if style.content.head else rf"/[^\{str(head[0])[0]}\s](.|\n)*/"
            bodies = [_join(sequence(style.content.head), "TEXT_BEFORE?"), "calls"]
        else:
            free, bodies = TEXT, ["TEXT_BEFORE? calls?"]
        rules["TEXT_BEFORE"] = free
        ends += style.content.ends
    rules["body"] = " | ".join(bodies)
    has_leading = leading and (bodies == ["calls"] or "form" in rules)  # line breaks where nothing comes before calls
    start = f"({literal(leading)} calls | body)" if has_leading else "body"
    if style.reasoning is not None and shape.opening != "closed":
        rules["TEXT"], rules["BREAK"] = TEXT, r"/\n{0,3}/"
        before = "" if shape.opening == "open" else sequence(style.reasoning.before)
        rules["reasoning"] = _join(before, "TEXT?", sequence(style.reasoning.after))
        gap = "" if "TEXT_BEFORE" in rules or style.content.head else "BREAK"
        thought = _join("reasoning", gap, "body")
        start = thought if shape.opening == "open" else f"{thought} | {start}"
    text = "".join(f"{name}: {rule}\n" for name, rule in ({"start": start} | rules).items())
    return AnswerGrammar(FREE_TOKENS + text if style.whole_pieces else text, tuple(dict.fromkeys(ends)))


def _split_leading(head: Pieces) -> tuple[str, Pieces]:
    """Split off the line breaks with which the head of calls begins."""
    first = head[0] if head else ""
    if not isinstance(first, str) or not first.startswith("\n"):
        return "", head
    stripped = first.lstrip("\n")
    return first[: len(first) - len(stripped)], (stripped, *head[1:]) if stripped else head[1:]


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
