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


def form_complaint(form: ContentForm) -> str | None:
    """Why a form of content cannot be kept, in llguidance's words; `None` if it can.

    Raises:
        InvalidRequestError: a client's own grammar is not text only.
    """
    if form.kind == "json":
        return _complaint_about(f"start: {lark.schema(form.value, _ANY)}")
    if form.kind == "regex":
        return _complaint_about(f"start: {lark.regex(form.value)}")
    if form.kind == "grammar":
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
        problem = _complaint_about(f"start: {lark.schema(schema, _ANY)}")
    if problem is None:
        return schema
    if strict:
        where = f"{param}.function.parameters"
        raise InvalidRequestError(f"`{where}` of a strict tool cannot be enforced: {problem}", param=where)
    return _OBJECT


@functools.lru_cache(maxsize=1024)
def _complaint_about(grammar: str) -> str | None:
    problem = LLMatcher.validate_grammar(grammar)
    return complaint(problem) if problem else None


def complaint(text: str) -> str:
    """llguidance's explanation without the place in the grammar, which the client has not written."""
    text = re.split(r"\n\s*\d+ \| |\s\d+ \| ", text)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())[:600]
