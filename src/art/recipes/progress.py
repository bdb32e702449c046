"""Lines of progress that a recipe reports while it runs, and its result. It prints nothing: the caller does.

await art.recipes.auto("Answer the questions of guests", "./tiny", on_progress=print)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from art.costs import Ledger
from art.model import TrainableModel
from art.recipes.training_loop import StepReport
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


LAST_BOOKING_S = 3.0
"""Seconds that the last booking of costs may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """The result of one call of a recipe: the trained model, its steps and a verdict."""

    model: TrainableModel[Any, Any]
    """The trained model. Its server stopped with the recipe; register the model again to sample from it."""
    step: int
    """Step of the newest checkpoint."""
    reports: Sequence[StepReport]
    """Reports of the training steps that this call tried."""
    verdict: Verdict | None
    """What happened, why, and what to do; `None` if no step was tried and nothing was measured."""
    is_over_budget: bool
    """Whether the run ended early because its budget was spent."""

    @property
    def ending(self) -> str | None:
        """Why a finding of `stop_on` or `rollback_on` ended the training; `None` if none did."""
        return ending_of(self.reports)

    @property
    def is_untrained(self) -> bool:
        """Whether steps were tried and none of them could be trained."""
        return bool(self.reports) and not any(report.trained for report in self.reports)


def ending_of(reports: Sequence[StepReport]) -> str | None:
    """Return why a finding of the last step ended the training; `None` if none did."""
    return reports[-1].ending if reports else None


async def book_last(model: TrainableModel[Any, Any]) -> None:
    """Book the model's costs since the last step. Give up after `LAST_BOOKING_S`: the server may have ended already."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(model.book_costs(), LAST_BOOKING_S)


def report_costs(on_progress: OnProgress, ledger: Ledger) -> None:
    """Report the costs in a ledger by source as progress, unless nothing has a price."""
    if any(amount.priced or amount.unpriced for amount in ledger.totals().values()):
        on_progress(Progress("\n".join(["Costs of this model so far:", *(f"  {line}" for line in ledger.lines())])))
