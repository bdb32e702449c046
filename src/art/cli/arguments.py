"""Options that several commands have: models and tasks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from art.errors import ConfigError


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
