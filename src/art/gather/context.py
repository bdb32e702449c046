"""`GatherContext`: counts and shows how the rollouts of one gather end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Unpack

from art.compat.gather import OlderOptions, check_older_options
from art.errors import RolloutError
from art.gather.budget import CountBudget, Progress
from art.gather.faults import FaultWatch, raise_if_fatal
from art.messages import is_choice
from art.trajectory import PydanticException, Trajectory, TrajectoryGroup, finite_number, rollout_observer

logger = logging.getLogger(__name__)


class GatherContext(Progress):
    """Progress and failures of one gather (a run of many rollouts). Never share one between two gathers."""

    def __init__(
        self,
        pbar: Any = None,
        *,
        max_exceptions: float = 0,
        max_metrics: int | None = None,
        num_rollouts: int | None = None,
        increment_pbar: bool = True,
        faults: FaultWatch | None = None,
        rollout_timeout_s: float | None = None,
        **older: Unpack[OlderOptions],
    ) -> None:
        """
        Args:
            pbar: a tqdm bar that shows running means.
            max_exceptions: failures to tolerate: a count, or below 1 a share of the rollouts.
            max_metrics: number of metrics that the bar shows beside the reward.
            num_rollouts: rollouts that a share in `max_exceptions` refers to; by default the total of the bar.
            increment_pbar: whether each rollout advances the bar by one.
            faults: decides how many failures are too many, instead of `max_exceptions`.
            rollout_timeout_s: time limit of each rollout.
        """
        check_older_options(older)
        super().__init__(pbar, max_metrics)
        self.budget = CountBudget(self, max_exceptions, num_rollouts)
        self.policy: CountBudget | FaultWatch = self.budget if faults is None else faults
        self.increment_pbar = increment_pbar
        self.rollout_timeout_s = rollout_timeout_s
        self._seen: dict[int, Trajectory] = {}

    @property
    def max_exceptions(self) -> float:
        return self.budget.max_exceptions

    def rollout_finished(self, trajectory: Trajectory) -> None:
        """Count a trajectory. A second report of the same trajectory is ignored."""
        if id(trajectory) in self._seen:
            return
        self._seen[id(trajectory)] = trajectory
        self.policy.count(trajectory)
        _add_completion_tokens(trajectory)
        self.add_trajectory(trajectory)
        self.show(int(self.increment_pbar))

    def rollout_failed(self, error: Exception) -> None:
        """Count a failed rollout.

        Raises:
            Exception: `error` itself, if it is one more than `max_exceptions` allows, or what `raise_if_fatal` raises.
            FaultRateError: it is one more than `faults` allows.
        """
        self.metric_sums["exceptions"] += 1
        self.show(int(self.increment_pbar))
        raise_if_fatal(error)
        if "'coroutine' object" in str(error):
            error.add_note("(was `await` forgotten?)")
        self.policy.failed(error)
        self.policy.failures.add(error)

    def group_failed(self, group: TrajectoryGroup, error: Exception) -> None:
        """Count a group whose `after_each` callback raised `error`. The group is dropped.

        Raises:
            Exception: `error` itself, if it must not be tolerated.
            FaultRateError: too many recent rollouts failed, including those of this group.
        """
        raise_if_fatal(error)
        self.policy.group_lost(group, error)
        self.metric_sums["exceptions"] += 1
        logger.warning("dropped a group, because scoring it failed: %s: %s", type(error).__name__, error)

    def without_unscored(self, group: TrajectoryGroup) -> list[TrajectoryGroup]:
        """Move rollouts whose reward is not a finite number to the `exceptions` of their group.

        The list that is returned has the group, and is empty if no rollout is left.

        Raises:
            RolloutError: there are more failures than `max_exceptions` allows.
            FaultRateError: there are more than `faults` allows.
        """
        unscored = [trajectory for trajectory in group if finite_number(trajectory.reward) is None]
        if not unscored:
            return [group]
        errors = [RolloutError(f"a rollout has the reward {t.reward!r}, which is no finite number") for t in unscored]
        for error in errors:
            self.metric_sums["exceptions"] += 1
            self.policy.lost(error)
        logger.warning("dropped %d rollouts: %s; check the reward function", len(errors), errors[0])
        scored = [trajectory for trajectory in group if finite_number(trajectory.reward) is not None]
        failed = [*group.exceptions, *map(PydanticException.from_exception, errors)]
        return [group.model_copy(update={"trajectories": scored, "exceptions": failed})] if scored else []


def get_gather_context() -> GatherContext:
    """Return the context of the surrounding gather, or else a new context that tolerates no failure."""
    current = rollout_observer.get()
    return current if isinstance(current, GatherContext) else GatherContext()


@contextlib.contextmanager
def set_gather_context(context: GatherContext) -> Iterator[None]:
    """Context manager: report the rollouts that are started inside it to `context`."""
    token = rollout_observer.set(context)
    try:
        yield
    finally:
        rollout_observer.reset(token)


def _add_completion_tokens(trajectory: Trajectory) -> None:
    """Set `metrics["completion_tokens"]`, the mean tokens per answer, if log-probs tell it and the user has not."""
    choices = [item for item in trajectory.messages_and_choices if is_choice(item)]
    counts = [len(choice.logprobs.content) for choice in choices if choice.logprobs and choice.logprobs.content]
    if counts:
        trajectory.metrics.setdefault("completion_tokens", sum(counts) / len(counts))
