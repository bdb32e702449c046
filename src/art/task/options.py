"""The options of a task: what a user may choose about it, such as the size of a board, with defaults and bounds.

    class MazeOptions(TaskOptions):
        size: int = Field(default=4, ge=2, le=9, description="Cells on each side.")

`-o size=6` on the command line, `Maze(size=6)` and `get_task("maze", {"size": 6})` set it. A docstring below the field
does for `description` in a file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from art.config.base import describe_invalid
from art.errors import ConfigError

MAX_LABEL = 80
"""Longest label. A model's name adds a seed to it and may have 128 characters."""


class TaskOptions(BaseModel):
    """What a user may choose about a task. Subclass it: each field needs a docstring, a default and bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    not_in_label: ClassVar[frozenset[str]] = frozenset()
    """Options that do not change what is learnt, such as a number of rollouts at once. A run goes on if they change."""


def read_options(task: str, kind: type[TaskOptions], values: Mapping[str, Any]) -> TaskOptions:
    """Make a task's options from values by name. A text, as the command line gives it, is read as the field's type.

    Args:
        task: name of the task, for errors.

    Raises:
        ConfigError: the task has no such option, or a value is not allowed.
    """
    if unknown := [name for name in values if name not in kind.model_fields]:
        raise ConfigError(_unknown(task, kind, unknown[0]))
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        failed = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
        texts = {name: _parsed(values[name]) for name in failed if isinstance(values.get(name), str)}
        try:  # `[1, 2]` or `3` as a text is no list or member of a Literal before it is parsed
            return kind.model_validate({**values, **texts})
        except ValidationError:
            options = "".join(f"\n  {line}" for line in describe_options(kind, only=failed))
            raise ConfigError(f"task {task!r}: option {describe_invalid(error)}{options}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _unknown(task: str, kind: type[TaskOptions], name: str) -> str:
    known = list(kind.model_fields)
    if not known:
        return f"task {task!r} takes no options, got {name!r}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listed = "\n  ".join(describe_options(kind))
    return f"task {task!r} has no option {name!r}{hint} Its options:\n  {listed}"


def describe_options(kind: type[TaskOptions], *, only: set[str] | None = None) -> list[str]:
    """Describe a task's options for people, one a line: name, default, what it is, and what is allowed.

    Example: `size=4  Cells on each side. (from 2 to 9)`
    """
    fields = {name: field for name, field in kind.model_fields.items() if only is None or name in only}
    return [f"{name}={_shown(field.default)}  {_about(kind, name, field)}".rstrip() for name, field in fields.items()]


def _about(kind: type[TaskOptions], name: str, field: FieldInfo) -> str:
    words = re.sub(r"\s+", " ", field.description or "")
    schema = kind.model_json_schema()["properties"][name]
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    allowed = " or ".join(filter(None, map(_allowed, parts)))
    return f"{words} ({allowed})" if allowed else words


def _allowed(schema: Mapping[str, Any]) -> str:
    if words := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(map(_shown, words))
    if schema.get("type") == "boolean":
        return "true, false"
    bounds = {
        "from": schema.get("minimum"), "above": schema.get("exclusiveMinimum"),
        "to": schema.get("maximum"), "below": schema.get("exclusiveMaximum"),
    }  # fmt: skip
    return " ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def label_of(name: str, options: TaskOptions) -> str:
    """Make a file-name safe label: the task's name, and the options that differ from their defaults.

    Example: `maze-size-6`. If a value has other signs than letters, digits, `.`, `_` and `-`, or if the label would be
    longer than `MAX_LABEL`, it ends with a hash.
    """
    changed = {key: value for key, value in changed_options(options).items() if key not in options.not_in_label}
    if not changed:
        return name
    return safe_label("-".join([name, *(f"{key}-{_shown(value)}" for key, value in changed.items())]))


def safe_label(text: str) -> str:
    """Make a text safe as a file name. It ends with a hash if signs were replaced, or if it was too long."""
    safe = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", text).strip("-")
    if safe == text and len(safe) <= MAX_LABEL:
        return safe
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{safe[: MAX_LABEL - 9].rstrip('-')}-{digest}"


def changed_options(options: TaskOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, in values that JSON can hold."""
    values = options.model_dump(mode="json")
    defaults = type(options)().model_dump(mode="json")
    return {key: value for key, value in values.items() if value != defaults[key]}


def spell_options(values: Mapping[str, Any], prefix: str = "") -> str:
    """Spell options as on the command line. Example: `size=3 shows_history=false`."""
    return " ".join(f"{prefix}{key}={_shown(value)}" for key, value in values.items())
