"""ART: on-the-job reinforcement learning for LLM agents.

Importing this loads neither torch, transformers, fastapi nor openai.
"""

import importlib
from typing import TYPE_CHECKING, Any

from art import dev, errors, utils
from art.backend import Backend, LocalTrainResult, TrainResult
from art.capture.context import (
    auto_trajectory,
    capture,
    capture_auto_trajectory,
    capture_yielded_trajectory,
    yield_trajectory,
)
from art.compat.refused import refuse
from art.config import ModelSettings, TrainConfig, TrainSFTConfig
from art.errors import ArtError
from art.gather import gather_trajectories, gather_trajectory_groups
from art.gather.batches import trajectory_group_batches
from art.gather.faults import FaultWatch
from art.messages import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools
from art.model import Model, TrainableModel
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup
from art.utils import retry

if TYPE_CHECKING:
    from art import langgraph, mcp, recipes, rewards, scenarios
    from art.backends.local import LocalBackend
    from art.backends.remote import RemoteBackend

__version__ = "0.1.0"

__all__ = [
    "ArtError",
    "Backend",
    "FaultWatch",
    "History",
    "LocalBackend",
    "LocalTrainResult",
    "Message",
    "MessageOrChoice",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "ModelSettings",
    "PydanticException",
    "RemoteBackend",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "dev",
    "errors",
    "gather_trajectories",
    "gather_trajectory_groups",
    "langgraph",
    "mcp",
    "recipes",
    "retry",
    "rewards",
    "scenarios",
    "trajectory_group_batches",
    "utils",
    "yield_trajectory",
]


def __getattr__(name: str) -> Any:
    """What not every program needs is imported at first use: backends, rewards, scenarios, MCP, integrations."""
    if name == "LocalBackend":
        from art.backends.local import LocalBackend

        return LocalBackend
    if name == "RemoteBackend":
        from art.backends.remote import RemoteBackend

        return RemoteBackend
    if name in ("rewards", "langgraph", "mcp", "recipes", "scenarios"):
        return importlib.import_module(f"art.{name}")
    return refuse("art", name)
