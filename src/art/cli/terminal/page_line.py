"""The line with which a command that trained ends: how to open the page about what it did."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console


def print_page_line(console: Console, data_dir: Path) -> None:
    """Print the command that opens the page, with the folder as short as it can be from here."""
    folder = os.path.relpath(data_dir) if data_dir.is_relative_to(Path.cwd()) else str(data_dir)
    command = "art view" if folder == ".art" else f"art view {shlex.quote(folder)}"
    console.print(f"the page    {command}", highlight=False, soft_wrap=True)
