"""ART: on-the-job reinforcement learning for LLM agents.

Importing this package loads neither torch, transformers, starlette nor openai. Parts that not every program needs are
imported when they are first used.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from art import errors
from art.capture import auto_trajectory, capture, current_trajectory, no_capture
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
from art.plugins import Group, find_older, find_plugins, load_plugin
from art.trajectory import History, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art import config, langgraph, mcp, recipes, rewards, scenarios
    from art import gather as gather  # names like this one can be imported, but are not in `__all__`
    from art.asynchronous.pipeline import pipeline
    from art.backend import Backend, RemoteBackend, TrainResult
    from art.backoff import retry as retry
    from art.capture import capture_auto_trajectory as capture_auto_trajectory
    from art.faults import FaultWatch
    from art.gather import capture_yielded_trajectory as capture_yielded_trajectory
    from art.gather import gather_trajectories, gather_trajectory_groups, trajectory_group, trajectory_group_batches
    from art.gather import yield_trajectory as yield_trajectory
    from art.local_backend import LocalBackend
    from art.messages import Message as Message
    from art.messages import MessageOrChoice as MessageOrChoice
    from art.messages import Messages as Messages
    from art.messages import MessagesAndChoices as MessagesAndChoices
    from art.messages import Tools as Tools
    from art.task import Scenario, Task, get_task, register_task
    from art.trajectory import PydanticException as PydanticException
    from art_cloud.serverless_backend import ServerlessBackend
    from art_cloud.skypilot_backend import SkyPilotBackend
    from art_cloud.ssh_backend import SshBackend
    from art_cluster.ray_workers import RayWorkers
    from openpipe_art.types import LocalTrainResult as LocalTrainResult

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
    "RayWorkers",
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

_LAZY_MODULES = frozenset({"gather", "langgraph", "mcp", "recipes", "rewards", "scenarios", "task"})
_LAZY_NAMES = {
    name: module
    for module, names in {
        "art.asynchronous.pipeline": ("pipeline",),
        "art.backend": ("Backend", "RemoteBackend", "TrainResult"),
        "art.backoff": ("retry",),
        "art.capture": ("capture_auto_trajectory",),
        "art.faults": ("FaultWatch",),
        "art.gather": (
            "capture_yielded_trajectory",
            "gather_trajectories",
            "gather_trajectory_groups",
            "trajectory_group",
            "trajectory_group_batches",
            "yield_trajectory",
        ),
        "art.local_backend": ("LocalBackend",),
        "art.messages": ("Message", "MessageOrChoice", "Messages", "MessagesAndChoices", "Tools"),
        "art.task": ("Scenario", "Task", "get_task", "register_task"),
        "art.trajectory": ("PydanticException",),
    }.items()
    for name in names
}
"""Names by the module that has them."""


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"art.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    if not name.startswith("_"):
        groups: tuple[Group, ...] = ("art.backends", "art.names")
        for group in groups:
            if name in find_plugins(group):
                return load_plugin(group, name)
        if (older := find_older()) is not None:
            return older.find_name(name)
    raise AttributeError(f"'art' has no attribute {name!r}")


class _OlderModules:
    """Finds modules of older code, which are elsewhere today. Python asks it for modules that it did not find."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        older = find_older() if name.startswith("art.") else None
        return None if older is None else older.find_module(name)


sys.meta_path.append(_OlderModules)
