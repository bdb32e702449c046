"""The module from which older code imports trajectories and groups; today they are in `art.trajectory`."""

from art.messages import get_messages
from art.trajectory import History, MetadataValue, PydanticException, Trajectory, TrajectoryGroup

LegacyHistory = History

__all__ = [
    "History",
    "LegacyHistory",
    "MetadataValue",
    "PydanticException",
    "Trajectory",
    "TrajectoryGroup",
    "get_messages",
]
