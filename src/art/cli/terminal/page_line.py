"""The line with which a command that trained ends: how to open the page about what it did."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console


def print_page_line(console: Console, data_dir: Path) -> None:
    """Print the command that opens the page, with the folder as short as it can be from here."""
    folder = os.path.relpath(data_dir) if data_dir.is_relative_to(Path.cwd()) else str(data_dir)
    command = f"{_program()} view" if folder == ".art" else f"{_program()} view {shlex.quote(folder)}"
    console.print(f"the page    {command}", highlight=False, soft_wrap=True)


def _program() -> str:
    """How this program was called, if a shell does not find it by its name alone."""
    called = sys.argv[0]
    return shlex.quote(called) if Path(called).name == "art" and shutil.which("art") is None else "art"
