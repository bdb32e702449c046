"""Writes and reads TOML files that people edit, with a comment above each key, and errors that name file and line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from art.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def write_toml(values: Mapping[str, Any], comments: Mapping[str, str], *, head: str) -> str:
    """Write settings as the text of a TOML file. A key whose value is `None` becomes a comment.

    Args:
        values: strings, numbers, booleans and tuples of numbers, by key.
        comments: comments by key, written above it.
        head: comment at the top.
    """
    lines = [f"# {line}" for line in head.splitlines()]
    for key, value in values.items():
        if key in comments:
            lines += ["", *(f"# {line}" for line in comments[key].splitlines())]
        lines.append(f"# {key} = ..." if value is None else f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(list(value) if isinstance(value, tuple) else value)
    if "\n" not in value:
        return _escape_control(json.dumps(value, ensure_ascii=False))
    # People edit prose, so it has no escapes if that is possible.
    if "'''" not in value and not value.endswith("'") and not _CONTROL.search(value):
        return f"'''\n{value}\n'''"
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"""\n{_escape_control(text)}\n"""'


def _escape_control(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def read_toml(path: Path, model: type[M]) -> M:
    """Read a TOML file, and check it against the pydantic class `model`.

    Raises:
        ConfigError: the file is missing, is not TOML, or does not fit `model`. The message is `FILE:LINE: problem`.
    """
    text = read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = place[1] if place else str(len(text.splitlines()))
        raise ConfigError(f"{path}:{line}: this is not TOML: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, first["loc"]))
        if not key and (named := re.match(r"`(\w+)` ", message)):
            key, message = named[1], message[named.end() :]
        if first["type"] == "extra_forbidden":
            message = f"unknown; there are {', '.join(model.model_fields)}"
        raise ConfigError(f"{path}:{_line_of(text, key)}: {key}: {message}") from None


def _line_of(text: str, key: str) -> int:
    """Line number of a key; 1 if it is missing."""
    lines = text.splitlines()
    return next((i for i, line in enumerate(lines, 1) if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line)), 1)


def read_text(path: Path) -> str:
    """Read a text file in UTF-8.

    Raises:
        ConfigError: the file is missing or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8: {error.reason}") from None
