"""Lines of progress that a recipe reports while it runs, and its result. It prints nothing: the caller does.

await art.recipes.auto("Answer the questions of guests", "./tiny", on_progress=print)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from art.costs import Ledger
from art.metrics.verdicts import NO_SPREAD, Ending, HeldOutChange, RunCourse, RunEnd, VerdictKind, describe_end
from art.model import TrainableModel
from art_recipes.training.training_loop import StepReport

logger = logging.getLogger(__name__)

ProgressKind = Literal["note", "warning", "busy"] | VerdictKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """What a run achieved, in a sentence, with reasons and remedies."""

    kind: VerdictKind
    what: str
    why: Sequence[str] = ()
    to_do: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of a recipe's progress, for people. `str()` gives its text, so `print` can receive it."""

    text: str
    kind: ProgressKind = "note"
    """`busy` names work that has just begun and lasts until the next line. `good`, `soft` and `bad` judge the run."""
    part: str = ""
    """The work that goes on after this line, if its parts are counted, e.g. `steps`."""
    done: int = 0
    """How many parts of it are done."""
    total: int = 0
    """How many parts it has."""

    def __str__(self) -> str:
        return self.text


OnProgress = Callable[[Progress], None]


def log_progress(progress: Progress) -> None:
    """Log a line of progress, as a warning or as information by its kind. Recipes do this by default."""
    logger.log(logging.WARNING if progress.kind == "warning" else logging.INFO, "%s", progress.text)


def report_verdict(on_progress: OnProgress, verdict: RunVerdict) -> None:
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
    verdict: RunVerdict | None
    """What happened, why, and what to do; `None` if no step was tried and nothing was measured."""
    is_over_budget: bool
    """Whether the run ended early because its budget was spent."""

    @property
    def is_untrained(self) -> bool:
        """Whether steps were tried and none of them could be trained."""
        return bool(self.reports) and not any(report.trained for report in self.reports)


def record_end(model: TrainableModel[Any, Any], ending: Ending, step: int, verdict: RunVerdict) -> None:
    """Leave the end of a training at a step in the model's state, for the page."""
    end = RunEnd(ending=ending, step=step, kind=verdict.kind, what=verdict.what, why=verdict.why)
    model.merge_state({"end": end.model_dump()})


async def book_last(model: TrainableModel[Any, Any]) -> None:
    """Book the model's costs since the last step. Give up after `LAST_BOOKING_S`: the server may have ended already."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(model.book_costs(), LAST_BOOKING_S)


def report_costs(on_progress: OnProgress, ledger: Ledger) -> None:
    """Report the costs in a ledger by source as progress, unless nothing has a price."""
    if any(amount.priced or amount.unpriced for amount in ledger.totals().values()):
        on_progress(Progress("\n".join(["Costs of this model so far:", *(f"  {line}" for line in ledger.lines())])))


MANY_FAULTS = 0.25
"""Share of policy faults that counts as a reason for a bad result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Advice to the user for each cause of a bad result, in the words of the command's options."""

    endings: Mapping[str, str] = field(default_factory=dict)
    """Advice for each kind of policy fault, by the metric that counts it."""
    no_spread: str = (
        "Give a scenario more --rollouts, take scenarios that the policy solves now and then, or a reward with more "
        "values between the best and the worst"
    )
    unclear: str = "Train longer with a higher --steps, or measure on more held-out rollouts for a narrower interval"
    faults: str = (
        "Begin with a base model that can do the format of this task now and then; `art doctor` checks a model "
        "before a training"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The facts about a training from which its verdict is made."""

    step: int
    """Step of the newest checkpoint."""
    num_steps: int
    """Step at which the training should end."""
    reports: Sequence[StepReport]
    """The steps that this call tried."""
    ending: Ending = "finished"
    stopped: str = ""
    """Why the training ended early; empty if it did not."""
    change: HeldOutChange | None = None
    endings: Mapping[str, float] = field(default_factory=dict)
    """Share of rollouts with each kind of policy fault."""

    @property
    def num_trained(self) -> int:
        return sum(report.trained for report in self.reports)

    @property
    def untrained(self) -> list[StepReport]:
        return [report for report in self.reports if not report.trained]

    @property
    def is_untrained(self) -> bool:
        return bool(self.reports) and not self.num_trained

    @property
    def fault_share(self) -> float:
        """Mean share of rollouts that ended as policy faults."""
        rates = [report.metrics.get("data/policy_fault_rate", 0.0) for report in self.reports]
        return statistics.fmean(rates) if rates else 0.0


def describe_faults(course: Course) -> str:
    """Say what share of the rollouts were faults of the policy, and of which kinds; empty if there were none."""
    if not course.fault_share:
        return ""
    known = sorted(course.endings.items(), key=lambda kind: -kind[1])
    kinds = ", ".join(f"{share:.0%} {name.replace('_', ' ')}" for name, share in known if share)
    return f"{course.fault_share:.0%} of the rollouts were faults of the policy itself{f' ({kinds})' if kinds else ''}"


def describe_untrained(course: Course) -> str:
    """Say how many steps were not trained, and why; empty if all were trained."""
    if not (count := len(course.untrained)):
        return ""
    return f"{count} of {len(course.reports)} steps were not trained: {NO_SPREAD} in {count}"


def reach_verdict(course: Course, remedies: Remedies) -> RunVerdict:
    """Judge a training by the change that it made, the steps that were not trained and the policy's faults."""
    kind, what = describe_end(
        RunCourse(
            step=course.step, num_steps=course.num_steps, num_tried=len(course.reports),
            num_trained=course.num_trained, ending=course.ending, change=course.change,
        )
    )  # fmt: skip
    many_faults = course.fault_share >= MANY_FAULTS
    why = [f"The run ended early, at step {course.step} of {course.num_steps}: {course.stopped}"] * bool(course.stopped)
    to_do = []
    if kind != "good":
        why += [] if course.is_untrained else [describe_untrained(course)]
        why += [describe_faults(course)] if many_faults else []
        if many_faults:
            to_do = [remedies.endings[name] for name, share in course.endings.items() if share >= MANY_FAULTS / 2]
            to_do.append(remedies.faults)
        if len(course.untrained) > len(course.reports) / 2:
            to_do.append(remedies.no_spread)
        if not course.is_untrained and course.change is not None:
            to_do.append(remedies.unclear if course.change.difference.high >= 0 else "Lower --learning-rate")
    to_do += ["The same command continues, from the newest checkpoint"] * bool(course.stopped)
    return RunVerdict(kind=kind, what=what, why=[text for text in why if text], to_do=to_do)
