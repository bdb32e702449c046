"""The console of commands: the progress of a recipe, and the line with which a training ends.

Text is shown as it is, with control characters as escapes. Much of it comes from models, servers, paths and errors:
rich would read `[rewards]` in it as a style and drop it, and a terminal would obey it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from art.cli.output import EXIT_BUDGET, EXIT_UNTRAINED, discard_output
from art.client.terminal import ProgressLine, above_progress
from art.storage.logs import escape_control
from art_recipes.training.progress import Progress, ProgressKind, RecipeResult


class Screen(Console):
    """A console without markup and emoji codes. Colour comes from `style=` or from a `Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        with above_progress():
            super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or escape_control(segment.text) == segment.text:
                yield segment
            else:
                yield Segment(escape_control(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        discard_output()  # else the last lines of the command would raise the error again
        raise BrokenPipeError


COLOURS: dict[ProgressKind, str] = {"warning": "yellow", "good": "green", "soft": "yellow", "bad": "red"}


class ProgressPrinter(ProgressLine):
    """Prints lines of progress, and shows what a recipe is busy with in one line. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def __call__(self, progress: Progress) -> None:
        what = progress.part or (progress.text if progress.kind == "busy" else "")
        if what == self.what:
            self.update(progress.done, progress.total)
        else:
            self.begin(what, progress.done, progress.total)
        if progress.kind != "busy":
            self._console.print(progress.text, style=COLOURS.get(progress.kind), highlight=False, soft_wrap=True)


def exit_code(result: RecipeResult) -> int:
    return EXIT_BUDGET if result.is_over_budget else EXIT_UNTRAINED if result.is_untrained else 0


def print_page_line(console: Console, data_dir: Path) -> None:
    """Print the command that opens the page, with the folder as short as it can be from here."""
    folder = os.path.relpath(data_dir) if data_dir.is_relative_to(Path.cwd()) else str(data_dir)
    called = sys.argv[0]  # how this program was called, if a shell does not find it by its name alone
    art = shlex.quote(called) if Path(called).name == "art" and shutil.which("art") is None else "art"
    command = f"{art} view" if folder == ".art" else f"{art} view {shlex.quote(folder)}"
    console.print(f"the page    {command}", highlight=False, soft_wrap=True)
