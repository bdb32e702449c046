"""`art tasks`: list the tasks that can be trained; `art tasks NAME` shows one with its options.

    art tasks game_2048
    art train game_2048 -o size=3

An environment of another framework is a task too: verifiers:NAME, openenv:URL, harbor:DIR.
"""

from __future__ import annotations

import argparse
import textwrap

from art.cli.arguments import TASK_HELP, add_task_options, options_of
from art.storage.log_lines import escape_control
from art.task import Task, get_task, list_tasks
from art.task.names import known_task
from art.task.options import changed_options, describe_options, spell_options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", metavar="NAME", help=TASK_HELP)
    add_task_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.task is not None:
        _show(get_task(args.task, options_of(args)))
        return 0
    tasks = {name: known_task(name) for name in list_tasks()}
    rows = [("task", "measured by", "what the agent learns")]
    rows += [(name, task.headline_metric, task.description) for name, task in tasks.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("art tasks NAME shows one with its options")
    print("verifiers:NAME, openenv:URL and harbor:DIR name environments of others")
    return 0


def _show(task: Task) -> None:
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
    print(escape_control("\n".join(lines)))
