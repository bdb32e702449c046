"""ART: on-the-job reinforcement learning for LLM agents.

Importing this package loads neither torch, transformers, fastapi nor openai. Parts that not every program needs are
imported when they are first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from art import errors
from art.backend import Backend, TrainResult
from art.capture.context import auto_trajectory, capture, current_trajectory, no_capture, trajectory_group
from art.config import (
    EngineConfig,
    LoraConfig,
    ModelSettings,
    OptimizerConfig,
    ServerConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
    VllmConfig,
)
from art.costs import Ledger, Prices
from art.errors import ArtError
from art.model import Model, TrainableModel
from art.trajectory import History, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art import config, langgraph, mcp, recipes, rewards, scenarios
    from art import dev as dev  # names like this one can be imported, but are not in `__all__`
    from art import gather as gather
    from art import trajectories as trajectories
    from art import types as types
    from art import utils as utils
    from art.asynchronous.pipeline import pipeline
    from art.backends.local import LocalBackend
    from art.backends.remote import RemoteBackend
    from art.backends.serverless.serverless_backend import ServerlessBackend
    from art.backends.skypilot.skypilot_backend import SkyPilotBackend
    from art.backends.ssh.ssh_backend import SshBackend
    from art.capture.context import capture_auto_trajectory as capture_auto_trajectory
    from art.capture.context import capture_yielded_trajectory as capture_yielded_trajectory
    from art.capture.context import yield_trajectory as yield_trajectory
    from art.gather import gather_trajectories, gather_trajectory_groups
    from art.gather.batches import trajectory_group_batches
    from art.gather.faults import FaultWatch
    from art.messages import Message as Message
    from art.messages import MessageOrChoice as MessageOrChoice
    from art.messages import Messages as Messages
    from art.messages import MessagesAndChoices as MessagesAndChoices
    from art.messages import Tools as Tools
    from art.task import Scenario, Task, get_task, register_task
    from art.trajectory import PydanticException as PydanticException
    from art.types import LocalTrainResult as LocalTrainResult
    from art.utils import retry as retry

__version__ = "0.1.0"

__all__ = [
    "ArtError",
    "Backend",
    "EngineConfig",
    "FaultWatch",
    "History",
    "Ledger",
    "LocalBackend",
    "LoraConfig",
    "Model",
    "ModelSettings",
    "OptimizerConfig",
    "Prices",
    "RemoteBackend",
    "Scenario",
    "ServerConfig",
    "ServerlessBackend",
    "SkyPilotBackend",
    "SshBackend",
    "Task",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "VllmConfig",
    "auto_trajectory",
    "capture",
    "config",
    "current_trajectory",
    "errors",
    "gather_trajectories",
    "gather_trajectory_groups",
    "get_task",
    "langgraph",
    "mcp",
    "no_capture",
    "pipeline",
    "recipes",
    "register_task",
    "rewards",
    "scenarios",
    "trajectory_group",
    "trajectory_group_batches",
]

_LAZY_MODULES = frozenset(
    {"dev", "gather", "langgraph", "mcp", "recipes", "rewards", "scenarios", "task", "trajectories", "types", "utils"}
)
_LAZY_NAMES = {
    name: module
    for module, names in {
        "art.asynchronous.pipeline": ("pipeline",),
        "art.backends.local": ("LocalBackend",),
        "art.backends.remote": ("RemoteBackend",),
        "art.backends.serverless.serverless_backend": ("ServerlessBackend",),
        "art.backends.skypilot.skypilot_backend": ("SkyPilotBackend",),
        "art.backends.ssh.ssh_backend": ("SshBackend",),
        "art.capture.context": ("capture_auto_trajectory", "capture_yielded_trajectory", "yield_trajectory"),
        "art.gather": ("gather_trajectories", "gather_trajectory_groups"),
        "art.gather.batches": ("trajectory_group_batches",),
        "art.gather.faults": ("FaultWatch",),
        "art.messages": ("Message", "MessageOrChoice", "Messages", "MessagesAndChoices", "Tools"),
        "art.task": ("Scenario", "Task", "get_task", "register_task"),
        "art.trajectory": ("PydanticException",),
        "art.types": ("LocalTrainResult",),
        "art.utils": ("retry",),
    }.items()
    for name in names
}
"""Names by the module that has them."""


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"art.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    from art.compat.refused import refuse

    return refuse("art", name)


class _OlderModules:
    """Refuses to import modules of older code that no longer exist. Python asks it for modules that it did not find."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("art."):
            from art.compat.refused import refuse_module

            refuse_module(name)


sys.meta_path.append(_OlderModules)
