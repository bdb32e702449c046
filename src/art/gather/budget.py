"""`CountBudget`: a fixed number or share of failures per gather. `FaultWatch`, in `faults.py`, may take its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

from art.errors import ArtError, JudgeError
from art.gather.faults import FailureLog
from art.trajectory import Trajectory, TrajectoryGroup, finite_number

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


@dataclass(eq=False)
class Progress:
    """Sums of the metrics of finished rollouts, and the bar that shows their means."""

    pbar: Any = None
    max_metrics: int | None = None
    """Number of metrics that the bar shows beside the reward; `None` for all."""
    metric_sums: Counter[str] = field(default_factory=Counter)
    """Sum of each metric; `exceptions` counts failures."""
    metric_divisors: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that had the metric."""

    @property
    def num_exceptions(self) -> int:
        return int(self.metric_sums["exceptions"])

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Add a rollout's reward and metrics to the sums; values that are not finite numbers are left out."""
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            if (number := finite_number(value)) is not None:
                self.metric_sums[name] += number  # type: ignore[assignment]
                self.metric_divisors[name] += 1

    def add(self, part: Progress) -> None:
        self.metric_sums.update(part.metric_sums)
        self.metric_divisors.update(part.metric_divisors)

    def reset(self) -> None:
        self.metric_sums.clear()
        self.metric_divisors.clear()

    def show(self, n: int) -> None:
        """Advance the bar by `n` and show the means, with the number of rollouts where not all have the metric."""
        if self.pbar is None:
            return
        names = [name for name in self.metric_divisors if name != "reward"][: self.max_metrics]
        shown = ["reward", *names] if "reward" in self.metric_divisors else names
        means: dict[str, Any] = {name: self.metric_sums[name] / self.metric_divisors[name] for name in shown}
        most = max(self.metric_divisors.values(), default=0)
        means |= {
            name: f"{means[name]:.3g} ({count} of {most})"
            for name in shown
            if (count := self.metric_divisors[name]) < most
        }
        if self.num_exceptions:
            means["exceptions"] = self.num_exceptions
        self.pbar.set_postfix(means, refresh=False)
        self.pbar.update(n)
