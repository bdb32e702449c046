"""Which task a command is about: `-o KEY=VALUE` on the command line, and the smaller form of a task for tiny models."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError
from art.task import Task, get_task
from art.task.defaults import is_tiny_model
from art.task.options import changed_options, spell_options
from art.task.tiny_form import other_task, read_form

if TYPE_CHECKING:
    from rich.console import Console

    from art.cli.terminal.plain import PlainLines

TASK_HELP = "task name, module:attribute or file.py:attribute of your own Task; `art tasks` lists them"


def add_task_options(parser: argparse._ActionsContainer) -> None:
    """Add `-o KEY=VALUE`. `args.task_options` is a list of pairs."""
    parser.add_argument(
        "-o", "--option", action="append", default=[], dest="task_options", type=_pair, metavar="KEY=VALUE",
        help="set an option of the task, e.g. -o size=3; may be given several times; `art tasks NAME` lists them",
    )  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. size=3, got {text!r}")
    return key.strip(), value


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of `-o` by name.

    Raises:
        ConfigError: an option is given twice.
    """
    keys = [key for key, _ in args.task_options]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"-o {twice[0]}=... is given more than once")
    return dict(args.task_options)


def task_for(
    console: Console | PlainLines, args: argparse.Namespace, base_model: str | None, *, warns: bool = True
) -> Task:
    """Return the task that `args.task` and `args.task_options` name, in the form that fits the base model.

    A tiny model gets the smaller form of a task that has one, or the form that it was made for; a printed line says so.
    The user's own options win.

    Args:
        base_model: `None` for a tiny model that is made for the task.
        warns: whether to warn of a tiny model that was made for another task, or for other options.

    Raises:
        ConfigError: there is no such task, or an option is not allowed.
    """
    options = options_of(args)
    is_tiny = base_model is None or is_tiny_model(base_model)
    task = get_task(args.task, options, is_tiny=is_tiny)
    form = None if base_model is None else read_form(base_model)
    if form is not None and form.name == task.name:
        known = {key: value for key, value in form.options.items() if key in task.options_class.model_fields}
        task = get_task(args.task, {**known, **options})
    if is_tiny and (line := _about_form(task, options)):
        console.print(line, highlight=False, soft_wrap=True)
    if warns and base_model is not None and (warning := other_task(task, base_model)):
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    return task


def _about_form(task: Task, options: Mapping[str, Any]) -> str | None:
    """Say which options a tiny model gets that the user has not set; `None` if there are none."""
    smaller = {key: value for key, value in changed_options(task.options).items() if key not in options}
    if not smaller:
        return None
    listed = spell_options(smaller, "-o ")
    return f"{task.name} in the form for tiny models: {listed}. Other base models get the full form"
