"""Read prompts from a file that people have: lines of text, JSON lines or a table.

    prompts.txt      one prompt a line
    prompts.jsonl    {"prompt": "..."} or {"input": "..."} or {"messages": [{"role": "user", "content": "..."}]}
    prompts.csv      a column `prompt` or `input`, or just one column

A line or row may name its split in `split`. Other keys and columns are not read. A prompt that comes twice counts once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from art.errors import ConfigError
from art.scenarios import WrittenScenario
from art.task import Split

_NAMES = ("prompt", "input")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The messages before the answer that is to be trained. The last one is the user's."""

    messages: tuple[dict[str, str], ...]
    split: Split | None = None

    @property
    def text(self) -> str:
        """The messages as one text: what the user says, and what was said before, if anything."""
        if len(self.messages) == 1:
            return self.messages[0]["content"].strip()
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages).strip()

    def written(self) -> WrittenScenario:
        return WrittenScenario(input=self.text, split=self.split)


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file, by the ending of its name.

    Raises:
        ConfigError: the file cannot be read, or has no prompt or a line that is none. The message names the line.
    """
    readers = {".txt": _read_lines, ".jsonl": _read_jsonl, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"prompts={path}: expected a file that ends in {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    prompts: dict[str, Prompt] = {}
    for number, row in readers[path.suffix.lower()](text, path):
        prompt = _prompt(row, f"{path}:{number}")
        prompts.setdefault(prompt.text, prompt)
    if not prompts:
        raise ConfigError(f"prompts={path}: there is no prompt in it")
    return list(prompts.values())


def _read_lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, {"prompt": line}


def _read_jsonl(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: this is not JSON: {error}") from None


def _read_csv(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    columns = rows.fieldnames or []
    if len(columns) > 1 and not set(columns) & set(_NAMES):
        raise ConfigError(f"{path}:1: expected a column `prompt` or `input`, found {', '.join(columns)}")
    for row in rows:
        values = {name: value for name, value in row.items() if isinstance(name, str) and value}
        only = {"prompt": values.get(columns[0])} if len(columns) == 1 else {}
        yield rows.line_num, values | only


def _prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError(f'{where}: expected an object like {{"prompt": "..."}}, got {str(row)[:80]}')
    split = row.get("split")
    if split is not None and split not in get_args(Split):
        raise ConfigError(f"{where}: `split` must be one of {', '.join(get_args(Split))}, got {split!r}")
    names = [name for name in (*_NAMES, "messages") if row.get(name)]
    if len(names) != 1:
        raise ConfigError(
            f"{where}: expected one of `prompt`, `input` and `messages`, got {' and '.join(names) or 'none'}"
        )
    value = row[names[0]]
    if names[0] == "messages":
        return Prompt(messages=_messages(value, where), split=split)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: `{names[0]}` must be a text, got {value!r}")
    return Prompt(messages=({"role": "user", "content": value.strip()},), split=split)


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    fault = f"{where}: `messages` must be a list of objects with `role` ({', '.join(_ROLES)}) and a text `content`"
    if not isinstance(value, list):
        raise ConfigError(f"{fault}, got {value!r}")
    for message in value:
        is_object = isinstance(message, dict) and message.get("role") in _ROLES
        if not is_object or not isinstance(message.get("content"), str) or set(message) != {"role", "content"}:
            raise ConfigError(f"{fault}, got {message!r}")
    if value[-1]["role"] != "user":
        raise ConfigError(f"{where}: the last of the `messages` must be the user's, got {value[-1]['role']!r}")
    return tuple(value)
