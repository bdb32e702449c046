"""The console of the commands. Text is shown as it is: much of it comes from models, servers, paths and errors, and
rich would take `[rewards]` in it for a style and swallow it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from art.cli.terminal.pipes import discard_output


class Screen(Console):
    """Knows no markup and no emoji codes. Colour comes from `style=`, or from a `Text` made for it.

    A `TextColumn` of a progress bar has a setting of its own for the same: `markup=False`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def status(self, status: Any, **options: Any) -> Status:
        return super().status(Text(status) if isinstance(status, str) else status, **options)

    def on_broken_pipe(self) -> None:
        discard_output()  # or what still has to be said on the way out would raise it again
        raise BrokenPipeError
