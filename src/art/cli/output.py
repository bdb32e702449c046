"""Output, exit codes and the event loop of commands. It needs the core package only."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from typing import TypeVar

from art.client.terminal import above_progress
from art.storage.logs import escape_control

EXIT_UNTRAINED = 1
"""Exit code if steps were tried and none of them could be trained."""
EXIT_BUDGET = 3
"""Exit code if the budget ended the run: it is neither complete nor a failure."""
EXIT_NO_SCORE = 4
"""Exit code if a comparison has a model without a score, because none of its rollouts worked."""
EXIT_WORSE = 5
"""Exit code if a comparison's `--require` is not met."""
EXIT_PIPE = 141
"""Exit code that shells report for a program that SIGPIPE ended."""


def until_unread(command: Callable[[], int]) -> int:
    """Run a command, and return its exit code, or `EXIT_PIPE` if nobody reads its output any more.

    Characters that the output cannot hold are printed as escapes: a file has the system's code page on Windows.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else the interpreter does it at its end, and reports the error
    except BrokenPipeError:
        discard_output()
        return EXIT_PIPE


def discard_output() -> None:
    """Discard everything that is printed from now on."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class PlainLines:
    """Prints lines as `Screen` does, without styles."""

    def print(self, text: str, *, style: str | None = None, highlight: bool = False, soft_wrap: bool = True) -> None:
        with above_progress():
            print(escape_control(text), file=sys.stderr, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length, the first of which has the names of the columns, with the columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """Say which package is missing and how to get it; `None` if no extra of ART brings that module."""
    module = (error.name or "").partition(".")[0]
    for requirement in metadata.requires("agent-reinforcement-trainer") or ():
        match = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", requirement)
        if match is not None and match[1].lower().replace("-", "_") == module:
            return f"{module} is not installed: pip install 'agent-reinforcement-trainer[{match[2]}]'"
    return None


def duration(text: str) -> int:
    """Read a time such as `30m` or `90d`, and return it in seconds.

    Raises:
        ArgumentTypeError: it is something else.
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; expected a number and s, m, h or d, such as 30m")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


Result = TypeVar("Result")


def run_coroutine(main: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, but on uvloop if it is installed: many requests take a tenth less time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
