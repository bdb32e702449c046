"""Lines of progress that a recipe reports while it runs. It prints nothing: the caller decides where they go.

await art.recipes.auto("Answer the questions of guests", "./tiny", on_progress=print)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from art.report import Verdict, VerdictKind

logger = logging.getLogger(__name__)

ProgressKind = Literal["note", "warning", "busy"] | VerdictKind


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of a recipe's progress, for people. `str()` gives its text, so `print` can receive it."""

    text: str
    kind: ProgressKind = "note"
    """`busy` names work that has just begun and lasts until the next line. `good`, `soft` and `bad` judge the run."""

    def __str__(self) -> str:
        return self.text


OnProgress = Callable[[Progress], None]


def log_progress(progress: Progress) -> None:
    """Log a line of progress, as a warning or as information by its kind. Recipes do this by default."""
    logger.log(logging.WARNING if progress.kind == "warning" else logging.INFO, "%s", progress.text)


def report_verdict(on_progress: OnProgress, verdict: Verdict) -> None:
    """Report as progress what a run achieved, then the reasons and what to do."""
    on_progress(Progress(f"{verdict.what}.", verdict.kind))
    for heading, lines in (("why", verdict.why), ("to do", verdict.to_do)):
        for line in lines:
            on_progress(Progress(f"  {heading}: {line}"))
