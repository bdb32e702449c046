"""One grammar for a whole answer: optional reasoning, then tool calls in the model's own format, or content in a form.

    start: reasoning BREAK calls | calls
    reasoning: <[151667]> TEXT? <[151668]>
    calls: <[151657]> "\\n{\\"name\\": \\"" call "}\\n" <[151658]>
    call: "look_up" "\\", \\"arguments\\": " %json {...}

What surrounds names and arguments is what the chat template writes (`style.py`). The token that ends an answer is not
part of its grammar: it is named beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from art.gateway.structure import lark
from art.gateway.structure.style import AnswerStyle, CallStyle, Opening, Pieces
from art.protocol.dialects.structured import CallRule, ContentForm


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
    """Write the grammar of an answer. Calls need a style that has them."""
    rules = lark.Rules()
    calls = style.calls if shape.rule.mode != "none" else None
    bodies: list[str] = []
    """Alternatives of the answer after its reasoning."""
    ends: list[int] = []
    leading = ""
    if calls is not None:
        leading, head = _split_leading(calls.head)
        rules.add("calls", _calls(rules, calls, head, shape))
        bodies.append("calls")
        ends.append(calls.end)
    if shape.form is not None and shape.rule.mode != "required":
        rules.add("form", _form(shape.form, _separators(calls)))
        bodies.append(_join(lark.sequence(style.content.head), "form"))
        ends += style.content.ends
    elif shape.rule.mode == "auto":
        text, with_calls = _free_text(style)
        rules.add("TEXT_BEFORE", text)
        bodies = ["TEXT_BEFORE? calls?"] if with_calls else [_join(lark.sequence(style.content.head), "TEXT_BEFORE?")]
        bodies += [] if with_calls else ["calls"]
        ends += style.content.ends
    rules.add("body", " | ".join(bodies))
    _add_start(rules, style, shape.opening, leading if bodies == ["calls"] or "form" in rules.lines else "")
    text = lark.FREE_TOKENS + rules.text() if style.whole_pieces else rules.text()
    return AnswerGrammar(text, tuple(dict.fromkeys(ends)))


def _add_start(rules: lark.Rules, style: AnswerStyle, opening: Opening, leading: str) -> None:
    """Add the rule `start`: reasoning as far as the prompt allows it, then the body.

    Args:
        leading: white space before the calls, where nothing comes before them.
    """
    plain = f"({lark.literal(leading)} calls | body)" if leading else "body"
    reasoning = style.reasoning
    if reasoning is None or opening == "closed":
        rules.add("start", plain)
        return
    rules.add("TEXT", lark.TEXT)
    rules.add("BREAK", r"/\n{0,3}/")
    before = "" if opening == "open" else lark.sequence(reasoning.before)
    rules.add("reasoning", _join(before, "TEXT?", lark.sequence(reasoning.after)))
    gap = "" if "TEXT_BEFORE" in rules.lines or style.content.head else "BREAK"
    thought = _join("reasoning", gap, "body")
    rules.add("start", thought if opening == "open" else f"{thought} | {plain}")


def _calls(rules: lark.Rules, style: CallStyle, head: Pieces, shape: AnswerShape) -> str:
    names = [name for name in shape.arguments if shape.rule.names is None or name in shape.rule.names]
    separators = _separators(style)
    middle = lark.sequence(style.middle)
    for i, name in enumerate(names):
        written = json.dumps(name)[1:-1] if style.quoted_name else name
        rules.add(f"call_{i}", _join(lark.literal(written), middle, lark.schema(shape.arguments[name], separators)))
    rules.add("call", " | ".join(f"call_{i}" for i in range(len(names))))
    more = ""
    if style.between is not None and not shape.rule.single:
        more = f"({lark.sequence(style.between)} call)*"
    return _join(lark.sequence(head), "call", more, lark.sequence(style.tail))


def _form(form: ContentForm, separators: tuple[str, str]) -> str:
    if form.kind == "json":
        return lark.schema(form.value, separators)
    if form.kind == "choice":
        return lark.choice(form.value)
    return lark.regex(form.value) if form.kind == "regex" else lark.grammar(form.value, form.param)


def _free_text(style: AnswerStyle) -> tuple[str, bool]:
    """Text that a model may write beside calls, and whether calls may follow it.

    They may where they begin with a special token. Otherwise text is what does not begin like a call.
    """
    assert style.calls is not None
    _, head = _split_leading(style.calls.head)
    if style.content.head:
        return lark.TEXT, False
    if isinstance(head[0], int):
        return lark.TEXT, True
    first = str(head[0])[0]
    return rf"/[^\{first}\s](.|\n)*/", False


def _split_leading(head: Pieces) -> tuple[str, Pieces]:
    """Split off the line breaks with which the head of calls begins."""
    first = head[0] if head else ""
    if not isinstance(first, str) or not first.startswith("\n"):
        return "", head
    stripped = first.lstrip("\n")
    rest = (stripped, *head[1:]) if stripped else head[1:]
    return first[: len(first) - len(stripped)], rest


def _separators(calls: CallStyle | None) -> tuple[str, str]:
    return (", ", ": ") if calls is None else (calls.item_separator, calls.key_separator)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
