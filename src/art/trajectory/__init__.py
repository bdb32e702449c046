"""The record of rollouts: `Trajectory`, and `TrajectoryGroup` for the trajectories of one scenario.

record    conversations, rewards and metrics of one rollout; the record of an exception
values    numbers and arrays of other libraries as plain Python values
group     trajectories to compare with each other
pending   a group whose rollouts have not run yet
"""

from art.trajectory.group import TrajectoryGroup
from art.trajectory.pending import (
    PendingGroup,
    RolloutObserver,
    cancel_and_wait,
    close_unstarted,
    rollout_observer,
    within,
)
from art.trajectory.record import (
    History,
    PydanticException,
    Trajectory,
    infra_fault,
    is_policy_fault,
    says_policy_fault,
)
from art.trajectory.values import MetadataValue, MetricValue, finite_number, to_plain

__all__ = [
    "History",
    "MetadataValue",
    "MetricValue",
    "PendingGroup",
    "PydanticException",
    "RolloutObserver",
    "Trajectory",
    "TrajectoryGroup",
    "cancel_and_wait",
    "close_unstarted",
    "finite_number",
    "infra_fault",
    "is_policy_fault",
    "rollout_observer",
    "says_policy_fault",
    "to_plain",
    "within",
]
