"""Ends a command quietly when the program that reads its output has gone, as in `art keys list | head -1`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable

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
