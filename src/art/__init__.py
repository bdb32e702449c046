"""ART: on-the-job reinforcement learning for LLM agents.

Importing this loads neither torch, transformers, fastapi nor openai.
"""

from typing import TYPE_CHECKING, Any

from art import dev, errors, utils
from art.backend import Backend, LocalTrainResult, TrainResult
from art.batches import trajectory_group_batches
from art.config import ModelSettings, TrainConfig, TrainSFTConfig
from art.errors import ArtError
from art.gather import gather_trajectories, gather_trajectory_groups
from art.messages import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools
from art.model import Model, TrainableModel
from art.trajectory import History, PydanticException, Trajectory, TrajectoryGroup
from art.utils import retry

if TYPE_CHECKING:
    from art.backends.local import LocalBackend
    from art.backends.remote import RemoteBackend

__version__ = "0.1.0"

__all__ = [
    "ArtError",
    "Backend",
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
    "dev",
    "errors",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
    "trajectory_group_batches",
    "utils",
]


def __getattr__(name: str) -> Any:
    """Kinds of backends are needed by scripts only; they are imported at first use."""
    if name == "LocalBackend":
        from art.backends.local import LocalBackend

        return LocalBackend
    if name == "RemoteBackend":
        from art.backends.remote import RemoteBackend

        return RemoteBackend
    raise AttributeError(f"module 'art' has no attribute {name!r}")
