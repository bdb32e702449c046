"""A data set as a folder of files that people can read and edit:

    task.toml           description, system prompt, rubric, limits of an answer
    scenarios.jsonl     one scenario a line: {"input": "...", "difficulty": 2, "split": "train"}

Lines can be changed, added and deleted by hand. A line without `split` gets one by its words (`split_of`).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from art.errors import ConfigError
from art.storage.atomic import write_file
from art_recipes.scenarios.written import (
    SPLITS,
    Split,
    TaskText,
    WrittenScenario,
    split_of,
)

M = TypeVar("M", bound=BaseModel)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def write_toml(values: Mapping[str, str | float], comments: Mapping[str, str], *, head: str) -> str:
    """Write settings as the text of a TOML file.

    Args:
        values: strings and numbers by key.
        comments: comments by key, written above it.
        head: comment at the top.
    """
    lines = [f"# {line}" for line in head.splitlines()]
    for key, value in values.items():
        if key in comments:
            lines += ["", *(f"# {line}" for line in comments[key].splitlines())]
        lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: str | float) -> str:
    if not isinstance(value, str):
        return repr(value)
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
        at = re.search(r"at line (\d+)", str(error))
        line = at[1] if at else str(len(text.splitlines()))
        raise ConfigError(f"{path}:{line}: this is not TOML: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        key, message = _problem(error, model)
        named = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        place = next((i for i, line in enumerate(text.splitlines(), 1) if named.match(line)), 1)
        raise ConfigError(f"{path}:{place}: {key}: {message}") from None


def _problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The key that is wrong, and what is wrong with it."""
    first = error.errors()[0]
    unknown = f"unknown; there are {', '.join(model.model_fields)}"
    return ".".join(map(str, first["loc"])), unknown if first["type"] == "extra_forbidden" else first["msg"]


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


TASK_FILE, SCENARIOS_FILE = "task.toml", "scenarios.jsonl"

_HEAD = "What an agent should learn. Change what you like."
_COMMENTS = {
    "description": "What the agent should do.",
    "system_prompt": "What the agent is told before each input.",
    "rubric": "Rules by which the judge compares answers to one input.",
    "max_completion_tokens": "Most tokens of an answer; a longer one is cut.",
    "temperature": "Sampling temperature. Training wants 1.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set to train on: the texts of a task (system prompt, rubric of the judge) and its scenarios."""

    task: TaskText
    scenarios: list[WrittenScenario]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read and check a data set's folder.

        Raises:
            ConfigError: a file is not JSON or TOML, or has an unknown key, a value out of range or an input twice. The
                message names file and line.
        """
        folder = Path(folder)
        task = read_toml(folder / TASK_FILE, TaskText)
        return cls(task=task, scenarios=_read_scenarios(folder / SCENARIOS_FILE))

    def save(self, folder: str | Path) -> None:
        """Write `task.toml` and `scenarios.jsonl` to `folder`, and overwrite those that exist."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / TASK_FILE, write_toml(self.task.model_dump(), _COMMENTS, head=_HEAD).encode())
        lines = (scenario.model_dump(exclude_none=True) for scenario in self.scenarios)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_file(folder / SCENARIOS_FILE, text.encode())

    def split(self, name: Split) -> list[WrittenScenario]:
        return [scenario for scenario in self.scenarios if split_of(scenario) == name]

    def summary(self) -> str:
        """The sizes of the splits and the difficulties, as lines for people."""
        sizes = ", ".join(f"{len(self.split(name))} {name}" for name in SPLITS)
        levels = Counter(scenario.difficulty for scenario in self.scenarios if scenario.difficulty is not None)
        lines = [f"{len(self.scenarios)} scenarios: {sizes}"]
        if levels:
            lines.append("difficulty: " + ", ".join(f"{count} of {level}" for level, count in sorted(levels.items())))
        return "\n".join(lines)


def _read_scenarios(path: Path) -> list[WrittenScenario]:
    scenarios: list[WrittenScenario] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        scenario = _read_line(line, f"{path}:{number}")
        if (first := lines.setdefault(" ".join(scenario.input.split()), number)) != number:
            raise ConfigError(f"{path}:{number}: the input is in line {first} already: {scenario.input!r}")
        scenarios.append(scenario)
    if not scenarios:
        raise ConfigError(f"{path}:1: there are no scenarios")
    return scenarios


def _read_line(line: str, where: str) -> WrittenScenario:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f'{where}: expected an object like {{"input": "..."}}, got {line.strip()[:80]}')
    try:
        return WrittenScenario.model_validate(data)
    except ValidationError as error:
        key, message = _problem(error, WrittenScenario)
        got = f", got {data[key]!r}" if key in data and key in WrittenScenario.model_fields else ""
        raise ConfigError(f"{where}: {key}: {message}{got}") from None
