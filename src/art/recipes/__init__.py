"""Functions that run a complete training, from a task, a sentence or an MCP server, and return the trained model.

    result = await art.recipes.auto("Answer the questions of guests", "./tiny", judge="openai/o3", on_progress=print)
    print(result.verdict.what, result.report_path)

The commands `art train`, `art auto` and `art mcp-rl` call these functions (recipes) and print their progress. A recipe
starts a `LocalBackend` of its own and runs in the event loop of the caller, so a notebook can await it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from art.recipes.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art.recipes.progress import OnProgress, Progress, RecipeResult, log_progress
from art.recipes.recipe_config import RecipeConfig
from art.recipes.task_training import TaskTrainingConfig, TaskTrainingResult, train
from art.recipes.training_loop import Evaluation, StepReport, evaluate, train_task

if TYPE_CHECKING:
    from art.recipes.autorl.auto import AutoConfig, auto, write_task
    from art.recipes.comparing.compare_models import compare_models
    from art.recipes.comparing.compared_models import BaseModel, Checkpoint, CompareConfig, Endpoint, OwnModel
    from art.recipes.judged.judged_run import JudgedConfig, JudgedResult
    from art.recipes.mcprl.mcp_rl import McpRlConfig, mcp_rl

__all__ = [
    "AutoConfig",
    "BaseModel",
    "Checkpoint",
    "CheckpointComparison",
    "CompareConfig",
    "ComparedScenario",
    "Endpoint",
    "Evaluation",
    "JudgedConfig",
    "JudgedResult",
    "McpRlConfig",
    "OnProgress",
    "OwnModel",
    "Progress",
    "RecipeConfig",
    "RecipeResult",
    "StepReport",
    "TaskTrainingConfig",
    "TaskTrainingResult",
    "auto",
    "compare_checkpoints",
    "compare_models",
    "evaluate",
    "log_progress",
    "mcp_rl",
    "train",
    "train_task",
    "write_task",
]

_LAZY_NAMES = {
    "AutoConfig": "autorl.auto",
    "BaseModel": "comparing.compared_models",
    "Checkpoint": "comparing.compared_models",
    "CompareConfig": "comparing.compared_models",
    "Endpoint": "comparing.compared_models",
    "JudgedConfig": "judged.judged_run",
    "JudgedResult": "judged.judged_run",
    "McpRlConfig": "mcprl.mcp_rl",
    "OwnModel": "comparing.compared_models",
    "auto": "autorl.auto",
    "compare_models": "comparing.compare_models",
    "mcp_rl": "mcprl.mcp_rl",
    "write_task": "autorl.auto",
}
"""Names whose modules `art train` does not need: they bring judges, MCP and other models."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'art.recipes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"art.recipes.{_LAZY_NAMES[name]}"), name)
