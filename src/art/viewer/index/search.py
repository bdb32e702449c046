"""Turns what a person types into a query for the index of words. Nothing in it is syntax but quotes and a last `*`."""

from __future__ import annotations

import re

from art.viewer.index.rows import searchable

_PIECES = re.compile(r'"([^"]*)"?|(\S+)')
_MOST_PIECES = 32


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split a search into words and phrases; the flag says whether the last word is the beginning of a word.

    Example: `late "no refund" invoi*` gives late, no refund, and invoi with the flag.
    """
    parts = []
    for quoted, word in _PIECES.findall(text)[:_MOST_PIECES]:
        is_prefix = word.endswith("*")
        content = quoted or word.rstrip("*")
        if any(character.isalnum() for character in content):
            parts.append((content, is_prefix))
    return parts


def match_query(text: str) -> str | None:
    """Write a search in the language of FTS5: all words and phrases must occur. `None` if there is no word in it."""
    terms = []
    for content, is_prefix in pieces(text):
        # A quote inside a string is doubled, and nothing else is special there.
        quoted = searchable(content.replace("\0", " ")).replace('"', '""')
        terms.append(f'"{quoted}"' + ("*" if is_prefix else ""))
    return " AND ".join(terms) or None


def find_in(text: str, search: str) -> tuple[int, int] | None:
    """Find the first match of any word or phrase of a search in a text, without regard to case."""
    best: tuple[int, int] | None = None
    lower = text.lower()
    for content, is_prefix in pieces(search):
        words = re.findall(r"\w+", content)
        if not words or not all(word.lower() in lower for word in words):
            continue  # the patterns below are slow on a long text
        pattern = r"(?<!\w)" + r"\W+".join(words) + ("" if is_prefix else r"(?!\w)")
        match = re.search(pattern, text, re.IGNORECASE) or re.search(r"\W*".join(words), text, re.IGNORECASE)
        if match and (best is None or match.start() < best[0]):
            best = match.span()
    return best
