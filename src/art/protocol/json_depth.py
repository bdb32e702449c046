"""How deeply a JSON text is nested, told without decoding it: decoders and templates of chat fail on deep ones."""

from __future__ import annotations

import re

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def is_deeper(text: str, limit: int) -> bool:
    """Tell whether lists and objects in a JSON text are nested more than `limit` deep."""
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > limit:
            return True
    return False
