"""docs/cli*.md: the help of every command, on a page for each kind of use."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

from art.cli.main import build_parser
from art.cli.server import build_parser as build_server_parser
from tools.pages.markdown import escaped, header, prose, table

_INTRODUCTION = """
Every command with its options. `art COMMAND --help` prints the same. The exit code is 0 when a
command did what it was asked. A shell completes them after `eval "$(art completion bash)"` (or zsh), or
`art completion fish | source`. Long work is told in one line on standard error, which is renewed in a
terminal; elsewhere a line is printed when nothing else was for 30 seconds.
"""
_RECIPES = ("auto", "compare", "judge", "mcp-rl")
_START = ("completion", "demo", "doctor", "mcp", "new", "status", "tasks", "tiny-model", "train", "view")
_PAGES = {
    "cli.md": ("Commands", _INTRODUCTION),
    "cli_recipes.md": (
        "Commands of recipes and judges",
        "Whole trainings without labels, comparisons, and judges. [Commands](cli.md) lists all.",
    ),
    "cli_server.md": (
        "Commands of servers",
        "Servers, keys, checkpoints, promotion and usage. [Commands](cli.md) lists all.",
    ),
}


def parsers() -> Iterator[tuple[argparse.ArgumentParser, int]]:
    """Yield the parser of every command and action, with the level of its heading."""
    for name in _actions(build_parser([])):
        command = _actions(build_parser([name]))[name]
        yield command, 2
        for action in _actions(command).values():
            yield action, 3
    yield build_server_parser(), 2


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the call without its options, which the table has."""
    names = [_names(action)[0] for action in parser._actions if not action.option_strings and not _is_help(action)]
    has_options = any(action.option_strings and not _is_help(action) for action in parser._actions)
    return " ".join([parser.prog, *names, *(["[options]"] if has_options else [])])


def _is_help(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS


def _names(action: argparse.Action) -> list[str]:
    """Return the ways to write an option, or the name of a positional argument."""
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if action.choices is not None and action.metavar is None:
        value = f"{{{','.join(map(str, action.choices))}}}"
    if not action.option_strings:
        return [f"{value}{' ...' if action.nargs in ('*', '+') else ''}"]
    return [option if action.nargs == 0 else f"{option} {value}" for option in action.option_strings]


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
    return (action.help or "") % {**values, "prog": parser.prog}


def _rows(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            rows += [(f"`{one.dest}`", escaped(one.help or "")) for one in action._get_subactions()]
        elif not _is_help(action):
            required = " (required)" if action.option_strings and action.required else ""
            names = ", ".join(f"`{name}`" for name in _names(action))
            rows.append((names, escaped(_help(action, parser)) + required))
    return rows


def page_of(prog: str) -> str:
    """Return the name of the page that a command or an action of it is on."""
    words = prog.split()
    if len(words) > 1 and words[1] in _START:
        return "cli.md"
    return "cli_recipes.md" if len(words) > 1 and words[1] in _RECIPES else "cli_server.md"


def pages() -> dict[str, Callable[[], str]]:
    """Return each page's name, with the function that renders it as Markdown."""
    return {name: functools.partial(_render, name) for name in _PAGES}


def _render(page: str) -> str:
    parts = [header(*_PAGES[page])]
    if page == "cli.md":
        (commands,) = (one for one in build_parser([])._actions if isinstance(one, argparse._SubParsersAction))
        named = [(f"art {one.dest}", one.help or "") for one in commands._get_subactions()]
        named += [("art-server", "run a server")]
        rows = [(f"[`{prog}`]({page_of(prog)}#{prog.replace(' ', '-')})", escaped(text)) for prog, text in named]
        parts += [table(("command", "does"), rows), "\n"]
    parts += [_section(parser, level) for parser, level in parsers() if page_of(parser.prog) == page]
    return "".join(parts).rstrip("\n") + "\n"


def _section(parser: argparse.ArgumentParser, level: int) -> str:
    parts = [f"{'#' * level} {parser.prog}\n\n", f"Usage: `{_usage(parser)}`\n\n"]
    if parser.description:
        parts += [prose(parser.description), "\n\n"]
    for group in parser._action_groups:
        if rows := _rows(parser, group._group_actions):
            kind = "argument" if group.title == "positional arguments" else "option"
            about = f"{group.title}: {group.description}" if group.description else group.title
            has_title = group.title not in ("options", "positional arguments")
            parts += [f"*{escaped(about or '')}*\n\n"] if has_title else []
            parts += [table((kind, "meaning"), rows), "\n"]
    return "".join(parts)
