"""Running many rollouts at once: groups, batches of them, and how rollouts end."""

from art.gather.context import GatherContext, get_gather_context, set_gather_context
from art.gather.gather import finish_group, gather_trajectories, gather_trajectory_groups, wrap_group_awaitable

__all__ = [
    "GatherContext",
    "finish_group",
    "gather_trajectories",
    "gather_trajectory_groups",
    "get_gather_context",
    "set_gather_context",
    "wrap_group_awaitable",
]
