"""Which schemas and forms llguidance can keep, asked before they become part of a grammar, so that errors name them."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from llguidance import LLMatcher

from art.errors import InvalidRequestError
from art.gateway.parsing.calls import property_schemas
from art.gateway.parsing.typed_text import kinds_of
from art.gateway.structure import lark
from art.gateway.structure.arguments import ANNOTATIONS, Schema, Unkept, key_problem, value_grammar
from art.gateway.structure.style import CallStyle
from art.protocol.dialects.structured import ContentForm

_ANY = (", ", ": ")
MAX_ITEMS = 1024
"""Largest `minItems` and `maxItems` of a schema. llguidance makes a rule for each item; 10**9 take all memory."""
_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data, not schemas."""
_OBJECT: Schema = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", *ANNOTATIONS))
"""What a schema of arguments may say in a format with tags."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_FUNCTION = re.compile(r"[^\s<>{}\"]+")
"""A name that every format with tags can write."""
_WITHIN = ("#/$defs/", "#/definitions/")


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


def kept_arguments(function: dict[str, Any], param: str, *, strict: bool, style: CallStyle) -> Schema:
    """The schema of a function's arguments for a format with tags: declared properties, each of which can be kept.

    Of a property that cannot be kept, a function that is not strict keeps the type only.

    Raises:
        InvalidRequestError: a strict function's schema cannot be kept, or the function's name or a required property
            cannot be written.
    """
    if not _FUNCTION.fullmatch(function["name"]):
        raise _unkept(f"{param}.function.name", "it has white space, a brace, an angle bracket or a quotation mark")
    parameters = function.get("parameters")
    root = parameters if isinstance(parameters, dict) else _OBJECT
    where = f"{param}.function.parameters"
    if strict and (extra := sorted(root.keys() - _ROOT)):
        raise _unkept(where, f"`{extra[0]}` is not supported there in this model's format of calls")
    if strict and root.get("type", "object") != "object":
        raise _unkept(where, f"its type is {root['type']!r}, but arguments are an object")
    listed = root.get("required")
    named, required = property_schemas(root), [str(key) for key in listed] if isinstance(listed, list) else []
    if root.get("additionalProperties") and (strict or not named):
        raise _unkept(where, "this model's format of calls needs the names of all properties; declare them")
    kept: dict[str, Schema] = {}
    for key, schema in {**named, **{key: {} for key in required if key not in named}}.items():
        path = f"{where}.properties.{key}"
        if (problem := key_problem(key)) is not None:
            if strict or key in required:
                raise _unkept(path, problem)
            continue
        if _REFERENCE.search(json.dumps(schema)):
            schema = {**schema, **{name: root[name] for name in _DEFINITIONS if name in root}}
        problem = _value_problem(schema, style)
        if problem is not None and strict:
            raise _unkept(path, problem)
        kept[key] = schema if problem is None else _type_only(schema)
    return {"properties": kept, "required": required}


def _type_only(schema: Schema) -> Schema:
    kinds = kinds_of(schema)
    return {"type": sorted(kinds)} if kinds else {}


def _value_problem(schema: Schema, style: CallStyle) -> str | None:
    outside = [ref for ref in _REFERENCE.findall(json.dumps(schema)) if not ref.startswith(_WITHIN)]
    if outside:
        return f"it refers to {outside[0]}; only $defs and definitions can be referred to"
    if (problem := _items_complaint(schema)) is not None:
        return problem
    try:
        return _complaint_about(value_grammar(schema, style))
    except Unkept as error:
        return str(error)
    except (TypeError, AttributeError):
        return "it is not a valid schema"


def _unkept(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{where}` cannot be enforced: {problem}", param=where)


@functools.lru_cache(maxsize=1024)
def _complaint_about(grammar: str) -> str | None:
    problem = LLMatcher.validate_grammar(grammar)
    return complaint(problem) if problem else None


def complaint(text: str) -> str:
    """llguidance's explanation without the place in the grammar, which the client has not written."""
    text = re.split(r"\n\s*\d+ \| |\s\d+ \| ", text)[0]
    return " ".join(re.sub(r"^(at )?\d+\(\d+\): ", "", text).split())[:600]
