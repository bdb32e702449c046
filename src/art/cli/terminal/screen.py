"""The console of the commands, and its progress bars.

Text is shown as it is, with control characters as escapes. Much of it comes from models, servers, paths and errors:
rich would read `[rewards]` in it as a style and drop it, and a terminal would obey it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from art.cli.terminal.pipes import discard_output
from art.storage.log_lines import escape_control

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


def progress_bar(console: Console, field: str = "", *, transient: bool = False) -> Progress:
    """A progress bar that shows a task's description, its count, its time and what is left of it, in a terminal only.

    Args:
        field: name of a text that the bar shows after them.
        transient: whether the bar disappears at its end.
    """
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left", markup=False), TimeRemainingColumn(),
    ]  # fmt: skip
    if field:
        columns.append(TextColumn(f"{{task.fields[{field}]}}", markup=False))
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)
