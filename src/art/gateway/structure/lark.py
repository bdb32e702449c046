"""Parts of a grammar as Lark text of llguidance: literals, special tokens, regular expressions, schemas, grammars.

Special tokens are always tokens by id. Text never matches a special token, even where it looks like one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from art.errors import InvalidRequestError
from art.gateway.structure.style import Pattern, Piece, Pieces

TEXT = r"/(.|\n)+/"
"""Any text without special tokens."""
FREE_TOKENS = '%llguidance {"no_forcing": true}\n'
"""Line with which a model writes text that it has no choice about in tokens of its own choice.

Without it, llguidance forces the tokens into which it cuts such text. That is what a model writes anyway if its tokens
are merged from smaller ones. It is not where a token is a whole phrase that is longer than the forced text.
"""


class Rules:
    """Rules by name, in the order in which they were added."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        self.lines[name] = body
        return name

    def text(self) -> str:
        start = {"start": self.lines["start"]}
        return "".join(f"{name}: {body}\n" for name, body in (start | self.lines).items())


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
    """JSON that matches a schema, with fixed white space.

    Args:
        separators: between items, and between a key and its value.
    """
    item, key = separators
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return f"%json {json.dumps({**value, 'x-guidance': options})}"


def regex(pattern: str) -> str:
    """A regular expression. It must match the whole text, with or without ^ and $ at its ends."""
    return "/" + re.sub(r"(?s)\\.|.", _regex_part, pattern) + "/"


def _regex_part(match: re.Match[str]) -> str:
    """A character or an escape of a regular expression, as it may be written between slashes on one line."""
    part = match[0]
    if not part[-1].isprintable():
        return f"\\x{{{ord(part[-1]):x}}}"
    return r"\/" if part == "/" else part


_STRINGS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Strings, comments and regular expressions of a Lark text."""


def schemas_of(text: str, param: str) -> list[Any]:
    """The JSON schemas inside a client's own grammar.

    Raises:
        InvalidRequestError: one of them is not JSON.
    """
    try:
        return [json.JSONDecoder().raw_decode(text, match.end())[0] for match in re.finditer(r"%json\s*", text)]
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"`{param}` has a %json that is not a JSON schema: {error}", param=param) from error


def grammar(text: str, param: str) -> str:
    """A client's own grammar, in Lark with a rule `start`, or in GBNF.

    Raises:
        InvalidRequestError: it names special tokens, or its braces do not match.
    """
    if "::=" in text:
        try:
            text = gbnf_to_lark(text).replace("%llguidance {}", "")
        except Exception as error:  # the converter has no error type of its own
            raise InvalidRequestError(f"`{param}` is not a grammar in GBNF: {error}", param=param) from error
    plain = _STRINGS.sub("", text)
    if "<" in plain:
        raise InvalidRequestError(
            f"`{param}` names a special token; a grammar of a request describes text only", param=param
        )
    depth = 0
    for brace in re.findall("[{}]", plain):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        raise InvalidRequestError(f"`{param}` has braces that do not match", param=param)
    return f"%lark {{\n{text}\n}}"
