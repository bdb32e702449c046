"""Remembers the step of each model of a backend, and which findings about its steps were logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from art.client.interrupt import forget_steps, note_step
from art.client.training.models import TrainResult
from art.config.training import OnNothing
from art.errors import NothingTrainableError, TrainingError
from art.protocol.training import JobStatus

logger = logging.getLogger(__name__)

REMIND_AFTER_STEPS = 20
"""A finding (a remark on a step) that comes up again is logged again only after this many steps."""


def result_of(status: JobStatus) -> TrainResult:
    """Make the result of a training job that succeeded.

    Raises:
        TrainingError: the job has no step; it is not one that trains.
    """
    if status.step is None:
        raise TrainingError(f"job {status.job_id} ended without a checkpoint; see the server's log")
    return TrainResult(
        step=status.step,
        trained=status.trained is not False,  # `None`: a server of an older version, which always trained
        metrics=status.metrics,
        findings=status.findings,
        checkpoint_path=status.checkpoint_path,
    )


class ModelSteps:
    """Remembers at which step one backend last saw each model (`project/name`) that it registered or trained."""

    def __init__(self) -> None:
        self._steps: dict[str, int | None] = {}
        """`None` until the server has told the step."""
        self._logged: dict[tuple[str, str], int] = {}
        """Step at which a finding was last logged, by model and meaning of the finding."""

    def expect(self, model: str) -> None:
        """Name `model` in the line that is printed after Ctrl-C, even before its step is known."""
        note_step(model, self._steps.setdefault(model, None))

    def note(self, model: str, step: int) -> int:
        """Remember that `model` is at `step`. Returns `step`."""
        self._steps[model] = step
        note_step(model, step)
        return step

    def forget(self) -> None:
        """Leave the models out of the line that is printed after Ctrl-C."""
        forget_steps(self._steps)

    def note_training(self, model: str, step: int, *, trained: bool) -> list[str]:
        """Remember the step after a training. Returns a finding if it began where this backend did not leave it."""
        known, before = self._steps.get(model), step - trained
        self.note(model, step)
        if known is None or before <= known:
            return []
        return [
            f"{model} was at step {before}, and this script had left it at step {known}: another job moved it. Does a "
            "second script train the same model, or was a call of `train` cancelled while its job went on? Give each "
            "script a model `name` of its own"
        ]

    def conclude(self, model: str, status: JobStatus, on_nothing: OnNothing) -> TrainResult:
        """Make the result of a training job of `model` that succeeded, and log its findings.

        Raises:
            NothingTrainableError: there was nothing to learn, and `on_nothing` is "raise".
        """
        result = result_of(status)
        findings = [*result.findings, *self.note_training(model, result.step, trained=result.trained)]
        self.log_findings(model, result.step, findings)
        if not result.trained and on_nothing == "raise":
            raise NothingTrainableError(findings[0])
        return replace(result, findings=findings)

    def skip(self, model: str, step: int, why: str) -> TrainResult:
        """Make the result of a step of `model` that had no trajectory to train on, and log why."""
        self.log_findings(model, self.note(model, step), [why])
        return TrainResult(step=step, trained=False, findings=[why])

    def log_findings(self, model: str, step: int, findings: Sequence[str]) -> None:
        """Log findings that were not logged recently. A finding reads "what was seen: what it means"."""
        for finding in findings:
            seen, _, meaning = finding.partition(": ")
            if "[" in seen:
                continue  # names single groups: some are left out in most steps, and the result lists them
            if step - self._logged.get((model, meaning), -math.inf) >= REMIND_AFTER_STEPS:
                self._logged[model, meaning] = step
                logger.warning("%s step %d: %s", model, step, finding)
