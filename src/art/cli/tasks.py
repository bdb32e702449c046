"""`art tasks` and `art new`: the known tasks, and the start of one of your own. They need the core package only."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
import textwrap
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path

from art.cli.arguments import TASK_HELP, add_task_options, options_of
from art.cli.output import print_table
from art.errors import ConfigError
from art.storage.logs import escape_control
from art.task import get_task, list_tasks
from art.task.names import known_task
from art.task.options import changed_options, describe_options, spell_options


def add_tasks_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", metavar="NAME", help=TASK_HELP)
    add_task_options(parser)


def run_tasks(args: argparse.Namespace) -> int:
    """`art tasks`: list the tasks that can be trained; `art tasks NAME` shows one with its options.

        art tasks game_2048
        art train game_2048 -o size=3

    An environment of another framework is a task too: verifiers:NAME, openenv:URL, harbor:DIR.
    """
    if args.task is None:
        tasks = {name: known_task(name) for name in list_tasks()}
        rows = [(name, task.headline_metric, task.description) for name, task in tasks.items()]
        print_table([("task", "measured by", "what the agent learns"), *rows])
        print("art tasks NAME shows one with its options")
        print("verifiers:NAME, openenv:URL and harbor:DIR name environments of others")
        return 0
    task = get_task(args.task, options_of(args))
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
    return 0


# -- a new agent --

_MODULE, _CLASS = "my_agent", "MyAgent"
"""Names in the templates that are replaced by those of the new agent."""


def add_new_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a new or empty folder; its name is that of the agent"
    )
    parser.add_argument("--tool", action="store_true", help="the agent acts by tool calls instead of plain text")


def run_new(args: argparse.Namespace) -> int:
    """`art new FOLDER`: write an agent that runs and learns as it is, to change into one of your own.

    It plays a small game: it guesses a hidden word. The folder gets a task (scenarios, rollout, reward, and the play
    that warms a tiny model up), its tests, and a README with the commands.
    """
    name = args.folder.resolve().name
    class_name = write_agent(args.folder, kind="tool" if args.tool else "text")
    print(
        f"{args.folder} has an agent that guesses a hidden word. Try it:\n\n"
        f"    cd {args.folder}\n"
        "    python -m pytest                          # its rules; needs pytest\n"
        f"    art demo --task {name}:{class_name}\n\n"
        "Then make the game your own. README.md has the other commands."
    )
    return 0


def write_agent(folder: Path, *, kind: str) -> str:
    """Write a new agent's task, tests and README into `folder`, and return the name of the task's class.

    Args:
        kind: how the agent acts: by `text` or by `tool` calls.

    Raises:
        ConfigError: the folder is not empty, or its name cannot be that of a module and a task.
    """
    templates = files("art.cli") / "new_agent"
    agent = (templates / kind / "agent.py.txt").read_text(encoding="utf-8")
    name = folder.resolve().name
    class_name = _check_name(name, agent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists already and is not an empty folder; give another name")
    texts = {
        f"{name}.py": agent,
        f"test_{name}.py": (templates / kind / "test_agent.py.txt").read_text(encoding="utf-8"),
        "README.md": (templates / "README.md").read_text(encoding="utf-8"),
        # The tests run coroutines themselves, and without a setting pytest-asyncio warns of a default of its own.
        "pytest.ini": "[pytest]\naddopts = -p no:asyncio\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text.replace(_MODULE, name).replace(_CLASS, class_name), encoding="utf-8")
    return class_name


def _check_name(name: str, agent: str) -> str:
    """The name of the class for a module's name; `nim_player` gives `NimPlayer`. Raises `ConfigError` if the name
    cannot be a module's, or is that of another module, class or task."""
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    what = f"the folder's name becomes that of a module, a class and a task; {name!r}"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not class_name.isidentifier() or keyword.iskeyword(name):
        likely = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
        example = likely if likely.isidentifier() and not keyword.iskeyword(likely) else _MODULE
        raise ConfigError(f"{what} cannot be one: use letters, digits and `_`, and begin with a letter, as {example!r}")
    if name in list_tasks():
        raise ConfigError(f"{what} is the name of a task that comes with ART; give another")
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()]
    spec = PathFinder.find_spec(name, elsewhere)
    if name in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        raise ConfigError(f"{what} is the name of a module that is installed here; give another")
    if class_name != _CLASS and re.search(rf"\b({name}|{class_name})\b", agent):
        raise ConfigError(f"{what} is a name that the agent's code uses itself; give another")
    return class_name
