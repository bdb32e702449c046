"""The ledger of a step, or of several: what became of every sampled token. And everything about one step."""

from __future__ import annotations

from art.viewer.answers.base import Answer
from art.viewer.answers.run_list import Finding


class Ledger(Answer):
    """Numbers of tokens: `sampled = trained + context + dropped`."""

    sampled: int
    trained: int
    context: int
    """Sampled tokens that the trainer reads and does not learn."""
    dropped: dict[str, int]
    """Number of dropped tokens by reason, the largest first."""


class LedgerAnswer(Answer):
    """The ledgers of steps, summed."""

    ledger: Ledger | None
    """Null if none of the steps has one."""
    first: int | None
    last: int | None
    """First and last step that have a ledger."""
    num_steps: int
    """Number of steps with a ledger."""
    meanings: dict[str, str]
    """What each reason means, where the catalogue has it."""


class StepDetail(Answer):
    """One step of a run."""

    step: int
    metrics: dict[str, float]
    """Means of the rows that were logged for the step."""
    findings: list[Finding]
    ledger: Ledger | None
    seconds: dict[str, float]
    """Time by phase: `trainer`, `updates`, `publish`, `gpu/rollouts` ... Phases may contain each other."""
    num_groups: int
    num_rollouts: int
    """Rollouts of the split `train` that were logged or trained."""
    previous: int | None
    next: int | None
    """Neighbouring steps that have metrics."""
