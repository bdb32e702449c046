"""The console of commands: progress bars, the progress of a recipe, and the line with which a training ends.

Text is shown as it is, with control characters as escapes. Much of it comes from models, servers, paths and errors:
rich would read `[rewards]` in it as a style and drop it, and a terminal would obey it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from art.cli.output import EXIT_BUDGET, EXIT_UNTRAINED, discard_output
from art.storage.logs import escape_control
from art_recipes.training.progress import Progress, ProgressKind, RecipeResult

SILENCE_S = 15.0
"""Seconds after which a line says how far the work is, where there is no terminal to show a bar."""


class Screen(Console):
    """A console without markup and emoji codes. Colour comes from `style=` or from a `Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def status(self, status: Any, **options: Any) -> Status:
        return super().status(Text(status) if isinstance(status, str) else status, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or escape_control(segment.text) == segment.text:
                yield segment
            else:
                yield Segment(escape_control(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        discard_output()  # else the last lines of the command would raise the error again
        raise BrokenPipeError


def progress_bar(console: Console, field: str = "", *, transient: bool = False) -> bars.Progress:
    """A progress bar that shows a task's description, its count, its time and what is left of it, in a terminal only.

    Args:
        field: name of a text that the bar shows after them.
        transient: whether the bar disappears at its end.
    """
    columns: list[bars.ProgressColumn] = [
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(bar_width=24), bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(), bars.TextColumn("left", markup=False), bars.TimeRemainingColumn(),
    ]  # fmt: skip
    if field:
        columns.append(bars.TextColumn(f"{{task.fields[{field}]}}", markup=False))
    return bars.Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


_COLOURS: dict[ProgressKind, str] = {"warning": "yellow", "good": "green", "soft": "yellow", "bad": "red"}


class ProgressPrinter:
    """Prints lines of progress, and shows a spinner while a recipe is busy. Use it as a context manager.

    Where there is no terminal, a line says what it is busy with, if nothing was printed for `SILENCE_S` seconds.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Status | None = None
        self._printed_at = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        self._stop()
        if progress.kind == "busy" and self._console.is_terminal:
            self._spinner = self._console.status(progress.text)
            self._spinner.start()
            return
        if progress.kind == "busy" and time.monotonic() - self._printed_at < SILENCE_S:
            return
        self._printed_at = time.monotonic()
        self._console.print(progress.text, style=_COLOURS.get(progress.kind), highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


def exit_code(result: RecipeResult) -> int:
    return EXIT_BUDGET if result.is_over_budget else EXIT_UNTRAINED if result.is_untrained else 0


def print_page_line(console: Console, data_dir: Path) -> None:
    """Print the command that opens the page, with the folder as short as it can be from here."""
    folder = os.path.relpath(data_dir) if data_dir.is_relative_to(Path.cwd()) else str(data_dir)
    called = sys.argv[0]  # how this program was called, if a shell does not find it by its name alone
    art = shlex.quote(called) if Path(called).name == "art" and shutil.which("art") is None else "art"
    command = f"{art} view" if folder == ".art" else f"{art} view {shlex.quote(folder)}"
    console.print(f"the page    {command}", highlight=False, soft_wrap=True)
