"""Trajectories and groups, under the module name of older code."""

from art.messages import get_messages
from art.trajectory import History, MetadataValue, PydanticException, Trajectory, TrajectoryGroup

__all__ = ["History", "MetadataValue", "PydanticException", "Trajectory", "TrajectoryGroup", "get_messages"]
