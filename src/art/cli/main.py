"""`art`: the command line.

A command is two functions, one that adds its options and one that runs it. Its module is imported only when it is
called. A command of another package is a module with `add_options` and `run`, whose docstring is the description in
`--help`.

A shell completes commands and options after `eval "$(art completion bash)"`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import art
from art.cli.arguments import Parser
from art.cli.output import how_to_install, until_unread
from art.client.terminal import EXIT_INTERRUPTED, above_progress, stopped
from art.errors import ArtError, ConfigError
from art.platforms import check_server_platform
from art.plugins import find_plugins
from art.storage.logs import LogFormatter, clean, known_secrets

COMMANDS = {
    "new": ("tasks", "write an agent of your own to start from"),
    "tasks": ("tasks", "list the tasks, or show one with its options"),
    "checkpoints": ("checkpoints", "list, fetch, delete, fork, export and push checkpoints of a server"),
    "usage": ("operator", "show what each project has used this month: tokens, steps, device hours, money"),
    "quota": ("operator", "limit what projects may use in a month"),
    "status": ("status", "show what the server of a data directory does"),
    "keys": ("operator", "make, list and revoke the keys of a server"),
    "completion": ("main", "print what makes a shell complete commands and options"),
}
"""The commands of the core: the module of this package with `add_NAME_options` and `run_NAME`, and what they do."""
GROUPS = {
    "begin": ("demo", "new", "tasks", "tiny-model", "doctor"),
    "train": ("train", "auto", "mcp-rl"),
    "watch and compare": ("view", "mcp", "status", "compare", "judge"),
    "serve": ("checkpoints", "promote", "launch", "worker"),
    "share a server": ("keys", "usage", "quota"),
}
"""Headings of `art --help`, with their commands. Others come last."""
SHELLS = ("bash", "zsh", "fish")


class StderrHandler(logging.Handler):
    """A log handler for the current `sys.stderr`, which a progress bar replaces to keep messages above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        with above_progress():
            print(self.format(record), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    return until_unread(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the command line may go on
        import argcomplete

        parser = build_parser(os.environ["COMP_LINE"].split()[1:])
        for command in (parser, *_commands(parser).values()):
            for action in command._actions:
                if action.dest == "task":
                    action.completer = lambda **_: find_plugins("art.tasks")  # type: ignore[attr-defined]
        argcomplete.autocomplete(parser)
    try:
        args = build_parser(arguments).parse_args(arguments)
        args.argv = arguments
        if argv is None:
            sys.path.append(os.getcwd())  # for the user's own tasks; an installed program starts without it
        handler = StderrHandler()
        handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s", known_secrets()))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        status: int = args.run(args)
    except ArtError as error:
        print(clean(f"art: {error}", known_secrets()), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (words := how_to_install(error)) is None:
            raise
        print(f"art: {words}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nart: {stopped()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser of `art`. It has options only for the command that `arguments` name, and imports only that."""
    parser = Parser(
        prog="art", usage="art [-h] [--version] COMMAND ...",
        description="On-the-job reinforcement learning for LLM agents.",
        epilog="`art COMMAND --help` shows the options of a command.",
    )  # fmt: skip
    parser.add_argument(
        "--version", action="version", version=f"art {art.__version__}", help="show the version and exit"
    )
    subparsers = parser.add_subparsers(
        prog="art", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    plugins = {name: plugin.value for name, plugin in find_plugins("art.commands").items()}
    is_listed = chosen not in COMMANDS | plugins or arguments[0] != chosen  # `--help` may come before the command
    grouped = [name for names in GROUPS.values() for name in names]
    for name in sorted(COMMANDS | plugins, key=lambda name: grouped.index(name) if name in grouped else len(grouped)):
        home, summary = COMMANDS.get(name, ("", ""))
        if is_listed and not home:
            summary = _first_line(plugins[name])
        command = subparsers.add_parser(name, help=summary)
        if name != chosen:
            continue
        if name in COMMANDS:
            module = importlib.import_module(f"art.cli.{home}")
            own = name.replace("-", "_")
            add_options, run = getattr(module, f"add_{own}_options"), getattr(module, f"run_{own}")
            description = inspect.getdoc(run)
        else:
            module = importlib.import_module(plugins[name])
            add_options, run, description = module.add_options, module.run, module.__doc__
        add_options(command)
        command.description = _sentence(_without_call(description or ""))
        for action in (one for one in command._actions if isinstance(one, argparse._SubParsersAction)):
            for listed in action._get_subactions():
                own = action.choices[listed.dest]
                own.description = own.description or _sentence(listed.help or "")
        command.set_defaults(run=run)
    for title, names in (GROUPS | {"other commands": set(subparsers.choices) - set(grouped)}).items():
        group = parser.add_argument_group(title)
        group._group_actions = [action for action in subparsers._get_subactions() if action.dest in names]
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that you use")


def run_completion(args: argparse.Namespace) -> int:
    """`art completion SHELL`: print what makes a shell complete commands, options and their values.

        eval "$(art completion bash)"         in ~/.bashrc
        eval "$(art completion zsh)"          in ~/.zshrc, after compinit
        art completion fish | source          in ~/.config/fish/config.fish

    It works in the next shell that you start.
    """
    from argcomplete.shell_integration import shellcode

    print(shellcode(["art"], True, args.shell))
    return 0


def _without_call(text: str) -> str:
    """Return a description without the call that it begins with, e.g. "`art train TASK`: "."""
    return re.sub(r"^`art[^`]*`: ", "", text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _first_line(module: str) -> str:
    """Read the first sentence of a module's docstring without importing the module."""
    spec = importlib.util.find_spec(module)
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    line = (ast.get_docstring(ast.parse(source)) or "its module cannot be found").partition("\n")[0]
    return _without_call(line).partition(". ")[0].rstrip(".")


def serve() -> int:
    """Run `art-server`, whose modules are not there on Windows or without the extra `local`."""
    try:
        check_server_platform("art-server")
        from art.cli.server import main as serve_until_stopped

        return serve_until_stopped()
    except (ConfigError, ModuleNotFoundError) as error:
        words = how_to_install(error) if isinstance(error, ModuleNotFoundError) else str(error)
        if words is None:
            raise
        print(f"art-server: {words}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
