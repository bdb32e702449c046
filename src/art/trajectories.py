"""Where older code looks for trajectories and groups."""

from art.messages import get_messages
from art.trajectory import History, MetadataValue, PydanticException, Trajectory, TrajectoryGroup

__all__ = ["History", "MetadataValue", "PydanticException", "Trajectory", "TrajectoryGroup", "get_messages"]
