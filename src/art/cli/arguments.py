"""What the command lines share: the form of their help, options for models and tasks, and files of settings."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from art.config.base import Config, describe_invalid, instead_of
from art.errors import ConfigError

WIDTH = 80
"""Most columns of a line of help."""


class HelpText(argparse.HelpFormatter):
    """Help of at most `WIDTH` columns. Paragraphs are filled, and those with indented lines stay as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": min(shutil.get_terminal_size().columns, WIDTH), **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.indent(part, indent) if "\n " in f"\n{part}" else "\n".join(_wrap(part, width, indent))
            for part in text.split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break text into lines, but never in a name of an option."""
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser with help in the form of `HelpText`. So are those of its actions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpText, **options})


def server_address(url: str | None) -> str:
    """Return the address of a server: `url`, else ART_SERVER_URL. Raises `ConfigError` if there is none."""
    if not (address := url or os.environ.get("ART_SERVER_URL")):
        raise ConfigError(
            "this command asks a server: give its address by --url or ART_SERVER_URL. After a script with "
            "`LocalBackend`, start one on its data: `art-server --data-dir .art`, then add --url http://127.0.0.1:5000"
        )
    return address


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A model, given as PROJECT/NAME, or one of its checkpoints, given as PROJECT/NAME@STEP."""

    project: str
    name: str
    step: int | None = None

    @classmethod
    def parse(cls, text: str) -> ModelArgument:
        path, at, step = text.partition("@")
        project, _, name = path.partition("/")
        if not project or not name or "/" in name or (at and not (step.isascii() and step.isdecimal())):
            raise argparse.ArgumentTypeError(
                f"a model is PROJECT/NAME, and one of its checkpoints PROJECT/NAME@STEP; got {text!r}"
            )
        return cls(project, name, int(step) if at else None)

    def __str__(self) -> str:
        return f"{self.project}/{self.name}" + ("" if self.step is None else f"@{self.step}")


TASK_HELP = "task name, module:attribute or file.py:attribute of your own Task; `art tasks` lists them"


def add_task_options(parser: argparse._ActionsContainer) -> None:
    """Add `-o KEY=VALUE`. `args.task_options` is a list of pairs."""

    def pair(text: str) -> tuple[str, str]:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. size=3, got {text!r}")
        return key.strip(), value

    parser.add_argument(
        "-o", "--option", action="append", default=[], dest="task_options", type=pair, metavar="KEY=VALUE",
        help="set an option of the task, e.g. -o size=3; may be given several times; `art tasks NAME` lists them",
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of `-o` by name. Raises `ConfigError` if an option is given twice."""
    keys = [key for key, _ in args.task_options]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"-o {twice[0]}=... is given more than once")
    return dict(args.task_options)


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read settings by name from a file in TOML, or in JSON if its name ends in .json.

    Raises:
        ConfigError: the file cannot be read; if its form is wrong, the message has the line.
    """
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: expected a file in TOML or JSON, whose name ends in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # of a file's form, or bad UTF-8
        raise ConfigError(f"{path} is not valid: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f'{path}: expected settings by name, such as {{"steps": 20}}, got {values!r}')
    return values


C = TypeVar("C", bound=Config)


def read_settings(
    config: type[C], values: Mapping[str, Any] | str, source: str = "", names: Mapping[str, str] | None = None
) -> C:
    """Make a config of settings by name, or of JSON.

    Args:
        source: where they are from, as the beginning of messages, except about settings in `names`.
        names: the user's name of a setting, where it differs from its own name.

    Raises:
        ConfigError: a setting is unknown or has a value that it cannot have. The message names it.
    """
    try:
        return config.model_validate_json(values) if isinstance(values, str) else config.model_validate(values)
    except ValidationError as error:
        first, hint = error.errors(include_url=False)[0], ""
        if first["type"] == "extra_forbidden" and instead_of(name := str(first["loc"][-1])) is None:
            schema = config.model_json_schema()
            known = {one for part in (schema, *schema.get("$defs", {}).values()) for one in part.get("properties", ())}
            near = difflib.get_close_matches(name, known - {name}, n=1, cutoff=0.6)
            hint = f"; did you mean `{near[0]}`?" if near else "; docs/settings.md lists all"
        is_elsewhere = not source or (first["loc"] and first["loc"][0] in (names or ()))
        place = "" if is_elsewhere else f"{source}: "
        raise ConfigError(f"{place}{describe_invalid(error, names)}{hint}") from None
