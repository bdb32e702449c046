"""Grammar of the arguments of a call in a format with a tag per argument (`tags.py`).

    first_0: ">\\n<parameter=key>\\n" value_0 next_1 | first_1      # the second only if `key` is optional
    next_1:  "\\n<parameter=more>\\n" value_1 next_2 | next_2
    value_0: TEXT_0                                              # a string as it is, up to its closing tag
    value_1: %json {...} "\\n</parameter>" | "None\\n</parameter>"  # other values as the template writes them

Properties come in the order of the schema. What is written is what the parser reads as the same value again: it types
text by the schema (`parsing/typed_text.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from art.gateway.parsing.typed_text import kinds_of, typed
from art.gateway.structure import lark
from art.gateway.structure.patterns import FORMATS, anywhere
from art.gateway.structure.style import CallStyle
from art.gateway.structure.tags import TagStyle

Schema: TypeAlias = dict[str, Any]


class Unkept(Exception):
    """The form that a schema asks for cannot be kept. The text says which and why."""


ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    )
)
"""Keywords that say nothing about values."""
_OF_STRINGS = frozenset(("pattern", "minLength", "maxLength", "format"))
_OF_OTHERS = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems"),
        *("minItems", "maxItems", "properties", "required", "additionalProperties"),
    )
)
"""Keywords that say nothing about strings."""
_MAX_LENGTH = 1_000
"""Longest string whose characters are counted, which takes milliseconds per token."""
_WORDS = r"~/(true|false|null|True|False|None)\s*/"
_NAME = re.compile(r"[^<>\"\s]([^<>\"\n\r]*[^<>\"\s])?")
"""A key that every format with tags can write."""


def write_arguments(name: str, schema: Schema, style: CallStyle, rules: lark.Rules) -> str:
    """Add the rules of what follows a function's name, up to where the call ends; return the first one's name.

    Args:
        name: prefix of the rules, unique in the grammar.
        schema: resolved, see `kept_arguments`.
    """
    assert style.tags is not None
    tags = style.tags
    keys = list(schema["properties"])
    required = set(schema["required"])
    value = lark.sequence(tags.value)
    rules.add(f"{name}_next_{len(keys)}", lark.sequence(tags.last) or '""')
    if not required:
        rules.add(f"{name}_first_{len(keys)}", lark.sequence(tags.empty) or '""')
    for i, key in reversed(list(enumerate(keys))):
        written = " | ".join(_values(schema["properties"][key], style, rules))
        body = f"{lark.literal(key)} {value} {rules.add(f'{name}_value_{i}', written)} {name}_next_{i + 1}"
        skip = key not in required
        after = f" | {name}_next_{i + 1}" if skip else ""
        rules.add(f"{name}_next_{i}", f"{lark.sequence(tags.following)} {body}{after}")
        if required <= set(keys[i:]):
            before = f" | {name}_first_{i + 1}" if skip else ""
            rules.add(f"{name}_first_{i}", f"{lark.sequence(tags.first)} {body}{before}")
    return f"{name}_first_0"


def value_grammar(schema: Schema, style: CallStyle) -> str:
    """A grammar of the values of a property alone.

    Raises:
        Unkept: there is none.
    """
    rules = lark.Rules()
    rules.add("start", " | ".join(_values(schema, style, rules)))
    return rules.text()


def key_problem(key: str) -> str | None:
    """Why a key cannot be written; `None` if it can."""
    if _NAME.fullmatch(key):
        return None
    return "its name has a quotation mark, an angle bracket or a line break, or a space at an end"


def _values(schema: Schema, style: CallStyle, rules: lark.Rules) -> list[str]:
    """Alternatives of a value, each with its end."""
    assert style.tags is not None
    tags, kinds = style.tags, kinds_of(schema)
    close = lark.literal(tags.close) if tags.close else ""
    if not kinds:
        _only(schema, frozenset())
        return [_text([], [], tags, rules)]
    result = []
    for branch in _branches(schema):
        if "enum" in branch or "const" in branch:
            result += [lark.literal(text + tags.close) for text in _enum(branch, schema, style)]
        elif branch["type"] == "string":
            alone = [] if kinds == {"string"} else [_WORDS]
            if kinds - {"string", "null"}:  # a string must not look like a value of another type
                alone.append("/[A-Za-z](?s:.*)/")
            result.append(_text(_conditions(branch), alone, tags, rules))
        elif branch["type"] in ("boolean", "null"):
            _only(branch, _OF_STRINGS | _OF_OTHERS | {"type"})
            values = (True, False) if branch["type"] == "boolean" else (None,)
            result += [lark.literal(tags.words[value] + tags.close) for value in values]
        else:
            plain = {key: value for key, value in branch.items() if key != "nullable"}
            result.append(f"{lark.schema(plain, (style.item_separator, style.key_separator))} {close}".rstrip())
    return result


def _branches(schema: Schema) -> Iterator[Schema]:
    """Schemas of which a value matches one, each with a single type, or with an enumeration."""
    for union in ("anyOf", "oneOf"):
        if union not in schema:
            continue
        _only(schema, frozenset((union,)))
        branches = [branch for one in schema[union] for branch in _branches(one)]
        kinds = [{"number" if kind == "integer" else kind for kind in kinds_of(one)} for one in schema[union]]
        if union == "oneOf" and sum(map(len, kinds)) > len(set().union(*kinds)):
            raise Unkept("branches of its `oneOf` have the same type; use `anyOf`")
        yield from ({**branch, **_definitions(schema)} for branch in branches)
        return
    if "enum" in schema or "const" in schema:
        yield schema
        return
    declared = schema.get("type")
    if declared is None:
        raise Unkept("a branch of it has no `type`")
    for kind in declared if isinstance(declared, list) else [declared]:
        yield {**schema, "type": kind}


def _enum(branch: Schema, schema: Schema, style: CallStyle) -> Iterator[str]:
    """Texts of the values of an enumeration."""
    assert style.tags is not None
    _only(branch, frozenset(("enum", "const", "type")))
    values = branch.get("enum", [branch.get("const")])
    if not isinstance(values, list) or not values:
        raise Unkept("its `enum` is not a list of values")
    for value in values:
        if "const" in branch and value != branch["const"]:
            continue
        if value is None or isinstance(value, bool):
            text = style.tags.words[value]
        elif isinstance(value, str):
            text = value
        else:
            text = json.dumps(value, ensure_ascii=False, separators=(style.item_separator, style.key_separator))
        back = typed(text, schema)
        if type(back) is not type(value) or back != value or any(tag in text for tag in style.tags.closing_tags):
            raise Unkept(f"its value {value!r} would be read as something else in this model's format of calls")
        yield text


def _conditions(schema: Schema) -> list[str]:
    """Regular expressions that a string matches, all of them."""
    _only(schema, _OF_STRINGS | _OF_OTHERS | {"type"})
    result = []
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, int | None) or not 0 <= least <= (most or least):
            raise Unkept("its `minLength` and `maxLength` are not a range")
        if max(least, most or 0) > _MAX_LENGTH:
            raise Unkept(f"its `minLength` and `maxLength` are at most {_MAX_LENGTH:,} in this model's format of calls")
        result.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    if "pattern" in schema:
        pattern = anywhere(schema["pattern"])
        if pattern is None:
            raise Unkept("its `pattern` has ^ or $ inside")
        result.append(lark.regex(pattern))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise Unkept(f"the `format` {schema['format']!r} is not known; known are {', '.join(FORMATS)}")
        result.append(lark.regex(FORMATS[schema["format"]]))
    return result


def _text(conditions: list[str], alone: list[str], tags: TagStyle, rules: lark.Rules) -> str:
    """Add a terminal for text without closing tags, with its end where that is text.

    Args:
        conditions: regular expressions of the text.
        alone: regular expressions of the text that white space at its end does not change.
    """
    closing = "|".join(re.escape(tag).replace("/", r"\/") for tag in tags.closing_tags)
    parts = ["/(?s:.*)/", f"~/(?s:.*)({closing})(?s:.*)/", *conditions, *alone]
    # Without conditions, a line break before the end is a part of the text: telling them apart at each line break takes
    # milliseconds of mask computation. The parser reads both alike.
    close = tags.close if conditions else tags.close.lstrip("\n")
    return rules.terminal(f"({' & '.join(parts)}) {lark.literal(close)}")


def _only(schema: Schema, known: frozenset[str]) -> None:
    unknown = sorted(schema.keys() - ANNOTATIONS - known)
    if unknown:
        raise Unkept(f"`{unknown[0]}` is not supported there in this model's format of calls")


def _definitions(schema: Schema) -> Schema:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
