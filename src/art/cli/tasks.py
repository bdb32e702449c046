"""`art tasks`: list the tasks that can be trained; `art tasks NAME` shows one with its options.

    art tasks game_2048
    art train game_2048 -o size=3

An environment of another framework is a task too: verifiers:NAME, openenv:URL, harbor:DIR.
"""

from __future__ import annotations

import argparse
import textwrap

from rich.console import Console
from rich.table import Table

from art.cli.options.task_options import TASK_HELP, add_task_options, options_of
from art.cli.terminal.screen import Screen
from art.task import Task, get_task, list_tasks
from art.task.options import changed_options, describe_options, spell_options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", metavar="NAME", help=TASK_HELP)
    add_task_options(parser)


def run(args: argparse.Namespace) -> int:
    console = Screen()
    if args.task is not None:
        _show(console, get_task(args.task, options_of(args)))
        return 0
    table = Table("task", "what the agent learns", "measured by", "options")
    for name in list_tasks():
        task = get_task(name)
        table.add_row(name, task.description, task.headline_metric, ", ".join(task.options_class.model_fields))
    console.print(table)
    console.print("art tasks NAME shows one; verifiers:NAME, openenv:URL and harbor:DIR name environments of others")
    return 0


def _show(console: Console, task: Task) -> None:
    about = textwrap.dedent(f"    {type(task).__doc__ or ''}").strip()
    lines = [f"{task.name}: {task.description}", "", *([about, ""] if about else [])]
    lines.append(f"measured by  {task.headline_metric}")
    if task.label != task.name:
        lines.append(f"project      {task.label}")
    if chosen := changed_options(task.options):
        lines.append(f"chosen       {spell_options(chosen)}")
    if task.tiny_options:
        lines.append(f"tiny models  {spell_options(task.tiny_options)}")
    if options := describe_options(task.options_class):
        lines += ["", "options (-o KEY=VALUE):", *(f"  {line}" for line in options)]
    if task.rubric:
        lines += ["", "a judge is told:", task.rubric]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
