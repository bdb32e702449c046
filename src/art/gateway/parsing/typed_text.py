"""Turn the text of one argument into a value of the type that the tool's schema declares.

Formats with a tag per argument write strings as they are and other values as JSON, or as Python's `str` writes them
(`True`, `None`, `{'x': [1]}`). Only the schema tells the text "5" from the number 5.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from art.gateway.parsing.calls import read_float

_MAX_LITERAL_CHARS = 20_000
"""Longest text that is read as a Python literal; `ast` needs much memory for longer ones."""


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of `text`. Text that fits no declared type stays text, so that the tool can complain about it."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    value = load_literal(text)
    is_null = value is None and text.strip() in ("null", "None")
    if not kinds:  # nothing is declared; text in quotation marks is text, since strings are written without them
        return value if is_null or not (value is None or isinstance(value, str)) else text
    if any(_FITS[kind](value) for kind in kinds - {"string", "null"}):
        return value
    return None if "null" in kinds and is_null else text


def load_literal(text: str) -> Any:
    """Decode JSON or a Python literal of JSON's types; `None` for other text, too."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=read_float)
    except (ValueError, RecursionError):
        pass
    if len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FITS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
}


def kinds_of(schema: Mapping[str, Any] | None) -> set[str]:
    """Types that a schema allows; empty if it does not say."""
    if schema is None:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    kinds = {name for name in names if isinstance(name, str) and name in _FITS}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            kinds |= kinds_of(branch) if isinstance(branch, dict) else set()
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
    if not kinds:
        kinds = {kind for value in values for kind, fits in _FITS.items() if fits(value)}
    if kinds and schema.get("nullable") is True:
        kinds.add("null")
    return kinds
