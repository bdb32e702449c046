"""The record of rollouts: `Trajectory`, and `TrajectoryGroup` for the trajectories of one scenario.

record    conversations, rewards and metrics of one rollout; the record of an exception
values    numbers and arrays of other libraries as plain Python values
group     trajectories to compare with each other
pending   a group whose rollouts have not run yet
"""

import sys
from collections.abc import Coroutine
from types import ModuleType
from typing import Any

from art.trajectory.group import TrajectoryGroup
from art.trajectory.pending import (
    PendingGroup,
    RolloutObserver,
    cancel_and_wait,
    close_unstarted,
    has_ended,
    rollout_observer,
    within,
)
from art.trajectory.record import (
    ChatExchange,
    History,
    MetadataValue,
    MetricValue,
    PydanticException,
    Trajectory,
    capture_with,
    captured_in,
    finite_number,
    infra_fault,
    is_policy_fault,
    says_policy_fault,
    to_plain,
)

__all__ = [
    "ChatExchange",
    "History",
    "MetadataValue",
    "MetricValue",
    "PendingGroup",
    "PydanticException",
    "RolloutObserver",
    "Trajectory",
    "TrajectoryGroup",
    "cancel_and_wait",
    "capture_with",
    "captured_in",
    "close_unstarted",
    "finite_number",
    "has_ended",
    "infra_fault",
    "is_policy_fault",
    "rollout_observer",
    "says_policy_fault",
    "to_plain",
    "within",
]


class _Room(ModuleType):
    """Makes `art.trajectory(rollout(model))` run a rollout and return the trajectory of its requests."""

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Trajectory]:
        return captured_in(coroutine)


sys.modules[__name__].__class__ = _Room
