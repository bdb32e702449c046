"""What a command does when the program that reads its output goes away, as in `art keys list | head -1`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

EXIT_PIPE = 141
"""What a shell reports of a program that SIGPIPE has ended."""


def until_unread(command: Callable[[], int]) -> int:
    """The exit code of `command`, or `EXIT_PIPE` if nobody reads what it prints any more; without a traceback."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # or the interpreter does it at its end, and complains
    except BrokenPipeError:
        discard_output()
        return EXIT_PIPE


def discard_output() -> None:
    """Send what is printed from now on, while the command ends, to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
