"""Parts of an answer that are the same in each answer: literal text, special tokens, patterns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from art.gateway.format.tokenizer import Tokenizer


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


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """The text of `as_text` with its special tokens written out."""
    return "".join(tokenizer.text([part]) if isinstance(part, int) else str(part) for part in pieces(text))


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
