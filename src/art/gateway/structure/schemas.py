"""Which schemas and forms llguidance can keep, asked before they become part of a grammar, so that errors name them."""

from __future__ import annotations

import functools
import re
from typing import Any

from llguidance import LLMatcher

from art.errors import InvalidRequestError
from art.gateway.structure import lark
from art.protocol.dialects.structured import ContentForm

_ANY = (", ", ": ")
_OBJECT: dict[str, Any] = {"type": "object"}
MAX_ITEMS = 1024
"""Largest `minItems` and `maxItems` of a schema. llguidance makes a rule for each item; 10**9 take all memory."""
_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data, not schemas."""


def form_complaint(form: ContentForm) -> str | None:
    """Why a form of content cannot be kept, in llguidance's words; `None` if it can.

    Raises:
        InvalidRequestError: a client's own grammar is not text only.
    """
    if form.kind == "json":
        return _schema_complaint(form.value)
    if form.kind == "regex":
        return _complaint_about(f"start: {lark.regex(form.value)}")
    if form.kind == "grammar":
        for schema in lark.schemas_of(form.value, form.param):
            if (problem := _items_complaint(schema)) is not None:
                return problem
        return _complaint_about(f"start: form\nform: {lark.grammar(form.value, form.param)}\n")
    return None


def arguments_schema(parameters: Any, param: str, *, strict: bool) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object.

    The arguments of a function that is not strict may be any object if llguidance cannot keep its schema.

    Raises:
        InvalidRequestError: a strict function's schema cannot be kept.
    """
    schema = {**parameters, "type": "object"} if isinstance(parameters, dict) else _OBJECT
    if isinstance(parameters, dict) and parameters.get("type", "object") != "object":
        problem: str | None = f"its type is {parameters['type']!r}, but arguments are an object"
    else:
        problem = _schema_complaint(schema)
    if problem is None:
        return schema
    if strict:
        where = f"{param}.function.parameters"
        raise InvalidRequestError(f"`{where}` of a strict tool cannot be enforced: {problem}", param=where)
    return _OBJECT


def _schema_complaint(schema: dict[str, Any]) -> str | None:
    return _items_complaint(schema) or _complaint_about(f"start: {lark.schema(schema, _ANY)}")


def _items_complaint(schema: Any) -> str | None:
    """Complain of an array with too many items, anywhere in a schema."""
    if isinstance(schema, list):
        return next(filter(None, map(_items_complaint, schema)), None)
    if not isinstance(schema, dict):
        return None
    for key, value in schema.items():
        if key in ("minItems", "maxItems") and isinstance(value, int | float) and value > MAX_ITEMS:
            return f"`{key}` is {value:.4g}; at most {MAX_ITEMS:,} can be kept"
    return next(filter(None, (_items_complaint(value) for key, value in schema.items() if key not in _DATA)), None)


@functools.lru_cache(maxsize=1024)
def _complaint_about(grammar: str) -> str | None:
    problem = LLMatcher.validate_grammar(grammar)
    return complaint(problem) if problem else None


def complaint(text: str) -> str:
    """llguidance's explanation without the place in the grammar, which the client has not written."""
    text = re.split(r"\n\s*\d+ \| |\s\d+ \| ", text)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())[:600]
