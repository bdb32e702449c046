"""Prints the progress of a recipe, and turns its result into an exit code."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.status import Status

from art.cli.terminal.screen import SILENCE_S
from art.recipes.progress import Progress, ProgressKind, RecipeResult

EXIT_UNTRAINED = 1
"""Exit code if steps were tried and none of them could be trained."""
EXIT_BUDGET = 3
"""Exit code if the budget ended the run: it is neither complete nor a failure."""
EXIT_NO_SCORE = 4
"""Exit code if a comparison has a model without a score, because none of its rollouts worked."""
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
