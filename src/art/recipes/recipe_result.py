"""The result of a recipe, and the booking and report of its costs at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art.costs import Ledger
from art.model import TrainableModel
from art.recipes.progress import OnProgress, Progress
from art.recipes.training_loop import StepReport
from art.report import Verdict

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
