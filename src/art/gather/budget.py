"""`CountBudget`: a fixed number or share of failures per gather. `FaultWatch`, in `faults.py`, may take its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from art.errors import ArtError, JudgeError
from art.gather.faults import FailureLog
from art.gather.progress import Progress
from art.trajectory import Trajectory, TrajectoryGroup

_HOW_TO_GO_ON = (
    "This is one failure more than the gather tolerates. To go on without rollouts that fail, pass max_exceptions= "
    "(for batches max_batch_exceptions=), a number or below 1 a share of the rollouts, or faults=art.FaultWatch()"
)


@dataclass
class CountBudget:
    """Counts the failed rollouts of one gather. The first failure above `max_exceptions` raises its error."""

    progress: Progress
    max_exceptions: float = 0
    """A number of failures, or below 1 a share of `num_rollouts`."""
    num_rollouts: int | None = None
    """Number of rollouts that a share refers to; by default the total of the progress bar."""
    num_failed: int = 0
    last_error: Exception | None = None
    failures: FailureLog = field(default_factory=FailureLog)

    def count(self, trajectory: Trajectory) -> None:
        """Do nothing: only failures count."""

    def failed(self, error: Exception) -> None:
        """Count a failed rollout."""
        self.num_failed += 1
        self.last_error = error
        if self.is_exceeded():
            self._raise(error)

    def lost(self, error: Exception) -> None:
        """Count a rollout that returned a trajectory, but has no usable reward."""
        self.failed(error)

    def group_lost(self, group: TrajectoryGroup, error: Exception) -> None:
        """Count a group that could not be scored as one failure. Raise any error that is not transient or a judge's."""
        if not isinstance(error, JudgeError) and not (isinstance(error, ArtError) and error.transient):
            raise error
        self.failed(error)

    def is_exceeded(self) -> bool:
        limit = self.max_exceptions
        if 0 < limit < 1:
            limit *= self.num_rollouts or getattr(self.progress.pbar, "total", None) or 0
        return self.num_failed > limit

    def _raise(self, error: Exception) -> NoReturn:
        if not getattr(error, "__notes__", ()) or _HOW_TO_GO_ON not in error.__notes__:
            error.add_note(_HOW_TO_GO_ON)
        raise error

    def add(self, part: CountBudget) -> None:
        """Add the failures that `part`, the budget of one finished group, has counted.

        Raises:
            Exception: the last failure of `part`, if together they are too many.
        """
        self.num_failed += part.num_failed
        if part.last_error is not None and self.is_exceeded():
            self._raise(part.last_error)

    def reset(self) -> None:
        self.num_failed, self.last_error = 0, None
