"""What a training achieved, in one sentence. Commands end with it, and the page has it at the head of a run.

describe_end(RunCourse(step=30, num_steps=30, num_tried=30, num_trained=30, change=change))
("good", "It learnt: win on held-out rollouts 0.55 to 0.82, +0.27 (+0.20 to +0.34)")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from art.metrics.scores import Estimate

VerdictKind = Literal["good", "soft", "bad"]
Ending = Literal["finished", "stopped", "failed"]
"""`stopped` is the end of a training by Ctrl-C, by its budget, or with its process."""
NO_SPREAD = "all rewards of each group were equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutChange:
    """A metric of held-out rollouts before and after a training."""

    measure: str
    """Words for what is measured, e.g. `win on held-out rollouts`."""
    before: float
    after: float
    difference: Estimate
    """The difference on the scenarios that both have, which need not be `after - before`."""

    def text(self) -> str:
        """Write measure and numbers for people."""
        return f"{self.measure} {self.before:.2f} to {self.after:.2f}, {self.difference.text(sign=True)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCourse:
    """How far a training has come, and what it changed."""

    step: int
    """Step of the newest checkpoint."""
    num_steps: int | None
    """Step at which the training should end; `None` if its loop did not say."""
    num_tried: int
    num_trained: int
    """Steps that made a checkpoint, of `num_tried` that were tried."""
    ending: Ending = "finished"
    change: HeldOutChange | None = None


class RunEnd(BaseModel):
    """The end of a recipe's training, which it leaves in the model's state under the key `end` for the page."""

    ending: Ending
    step: int
    """Step of the newest checkpoint. A record of another step than the newest one says nothing any more."""
    kind: VerdictKind
    what: str
    """The sentence of `describe_end`."""
    why: Sequence[str] = ()
    """Reasons, e.g. the error that ended the training."""


def describe_end(course: RunCourse) -> tuple[VerdictKind, str]:
    """Judge a training, and say in a sentence without a full stop what happened."""
    of = "" if course.num_steps is None else f" of {course.num_steps}"
    kind: VerdictKind = "soft"
    gain = ""
    if course.change is not None:
        kind, gain = _describe_change(course.change)
    if course.num_tried and not course.num_trained:
        return "bad", f"Nothing was trained in {course.num_tried} steps: {NO_SPREAD}"
    if course.ending != "finished":
        what = f"It {'failed' if course.ending == 'failed' else 'was stopped'} at step {course.step}{of}"
        return "bad" if course.ending == "failed" else kind, f"{what}. {gain}" if gain else what
    if gain:
        return kind, gain
    if not course.num_tried:
        return "soft", f"The model is at step {course.step}"
    steps = "1 step was" if course.num_trained == 1 else f"{course.num_trained} steps were"
    return "soft", f"{steps} trained, up to step {course.step}{of}; no comparison with the untrained policy was made"


def _describe_change(change: HeldOutChange) -> tuple[VerdictKind, str]:
    if change.difference.low > 0:
        return "good", f"It learnt: {change.text()}"
    if change.difference.high < 0:
        return "bad", f"It got worse: {change.text()}"
    return "soft", f"No clear change: {change.text()}"
