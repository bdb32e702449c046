"""What a request asks of the form of its answer: response formats, vLLM's guided fields, and the choice of tools.

Each dialect is translated to the chat request, which these functions read. Every way of writing a form ends in one
`ContentForm`, and every way of choosing tools in one `CallRule`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from art.errors import InvalidRequestError

FormKind = Literal["json", "regex", "choice", "grammar"]
MAX_FORM_CHARS = 64 * 1024
"""Longest regular expression or grammar of a request, and largest schema as JSON text."""
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What the content of an answer must look like."""

    kind: FormKind
    value: Any
    """A JSON schema, a regular expression, a list of texts, or a grammar in Lark or GBNF."""
    param: str
    """The parameter that the client sent, for errors."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """Which tools an answer may call, and whether it must."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: frozenset[str] | None = None
    """Functions that may be called; `None` for all tools."""
    single: bool = False
    """Whether at most one call is allowed."""

    @property
    def restricts(self) -> bool:
        """Whether the rule keeps a model from something that it might do."""
        return self.mode == "required" or (self.mode == "auto" and (self.names is not None or self.single))


def read_format(value: dict[str, Any] | None, where: str, *, nested: bool) -> ContentForm | None:
    """Read a response format: `{"type": "json_schema", ...}`, `{"type": "json_object"}` or `{"type": "text"}`.

    Args:
        where: name of the parameter.
        nested: whether the schema is inside an object `json_schema`, as in chat; else it is beside the type.

    Raises:
        InvalidRequestError: the format is unknown or incomplete.
    """
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return ContentForm("json", {"type": "object"}, where)
    if value.get("type") != "json_schema":
        raise InvalidRequestError(
            f"`{where}.type` must be text, json_object or json_schema, got {value.get('type')!r}", param=f"{where}.type"
        )
    holder, path = (value.get("json_schema"), f"{where}.json_schema") if nested else (value, where)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    return ContentForm("json", _schema(schema, f"{path}.schema"), f"{path}.schema")


def read_guided(fields: dict[str, Any]) -> list[ContentForm]:
    """Read vLLM's `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` and `structured_outputs`.

    Args:
        fields: values by name; `None` for what was not sent.

    Raises:
        InvalidRequestError: a value is not valid, or `structured_outputs` has a key that is not supported.
    """
    pairs = [(name, name.removeprefix("guided_"), value) for name, value in fields.items() if name != _OUTPUTS]
    for key, value in (fields.get(_OUTPUTS) or {}).items():
        pairs.append((f"{_OUTPUTS}.{key}", key, value))
    return [_guided(param, key, value) for param, key, value in pairs if value is not None and value is not False]


_OUTPUTS = "structured_outputs"


def _guided(param: str, key: str, value: Any) -> ContentForm:
    if key == "json_object" and value is True:
        return ContentForm("json", {"type": "object"}, param)
    if key == "json":
        return ContentForm("json", _schema(_decoded(value), param), param)
    if key == "choice":
        texts = value if isinstance(value, list) else []
        if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError(
                f"`{param}` must be a list of 1 to {MAX_CHOICES} texts, none of them empty", param=param
            )
        _check_size(sum(map(len, texts)), param)
        return ContentForm("choice", texts, param)
    if key in ("regex", "grammar"):
        if not isinstance(value, str) or not value.strip():
            raise InvalidRequestError(f"`{param}` must be a text that is not empty", param=param)
        _check_size(len(value), param)
        return ContentForm("regex" if key == "regex" else "grammar", value, param)
    raise InvalidRequestError(
        f"`{param}` is not supported; supported are json, json_object, regex, choice and grammar", param=param
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _schema(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"`{param}` must be a JSON schema, an object", param=param)
    try:
        _check_size(len(json.dumps(value)), param)
    except RecursionError:
        raise InvalidRequestError(f"`{param}` is nested too deeply", param=param) from None
    return value


def _check_size(size: int, param: str) -> None:
    if size > MAX_FORM_CHARS:
        raise InvalidRequestError(
            f"`{param}` has {size:,} characters; at most {MAX_FORM_CHARS:,} are allowed", param=param
        )


def read_tool_choice(choice: Any, tool_names: Iterable[str], *, parallel: bool) -> CallRule:
    """Read `tool_choice` of a chat request, with `parallel_tool_calls`.

    Raises:
        InvalidRequestError: the choice has no known form, names no tool of the request, or there are no tools.
    """
    known = frozenset(tool_names)
    single = not parallel
    if choice == "none":
        return CallRule("none")
    if choice is None and not known:
        return CallRule("none")
    if not known:
        raise InvalidRequestError("`tool_choice` needs `tools`", param="tool_choice")
    if choice in (None, "auto"):
        return CallRule("auto", single=single)
    if choice == "required":
        return CallRule("required", single=single)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return CallRule("required", frozenset([_known_name(choice, known, "tool_choice")]), single=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools", choice), known, single=single)
    raise InvalidRequestError(
        "`tool_choice` must be 'auto', 'required', 'none', "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode": ..., '
        f'"tools": [...]}}}}, got {str(choice)[:80]!r}',
        param="tool_choice",
    )


def _read_allowed(allowed: Any, known: frozenset[str], *, single: bool) -> CallRule:
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequestError(
            "`tool_choice` of type allowed_tools must have a `mode`, auto or required, and a list of `tools`",
            param="tool_choice",
        )
    names = frozenset(_known_name(tool, known, "tool_choice") for tool in tools)
    return CallRule(mode, names, single=single)


def _known_name(entry: Any, known: frozenset[str], param: str) -> str:
    """The function named by `{"type": "function", "function": {"name": ...}}` or by `{"type": ..., "name": ...}`."""
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in known:
        raise InvalidRequestError(
            f"`{param}` names the function {name!r}, which is not in `tools`: {', '.join(sorted(known)) or 'none'}",
            param=param,
        )
    return name
