"""Functions that run a complete training, from a task, a sentence or an MCP server, and return the trained model.

    result = await art.recipes.auto("Answer the questions of guests", "./tiny", judge="openai/o3", on_progress=print)
    print(result.verdict.what, result.report_path)

The commands `art train`, `art auto` and `art mcp-rl` call these functions (recipes) and print their progress. A recipe
starts a `LocalBackend` of its own and runs in the event loop of the caller, so a notebook can await it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_recipes.autorl import AutoConfig, auto, write_task
    from art_recipes.comparing.compare_models import compare_models
    from art_recipes.comparing.compared_models import BaseModel, Checkpoint, CompareConfig, Endpoint, OwnModel
    from art_recipes.judged import JudgedConfig, JudgedResult
    from art_recipes.mcprl import McpRlConfig, mcp_rl
    from art_recipes.training.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
    from art_recipes.training.progress import OnProgress, Progress, RecipeResult, log_progress
    from art_recipes.training.recipe_config import RecipeConfig
    from art_recipes.training.task_training import TaskTrainingConfig, TaskTrainingResult, train
    from art_recipes.training.training_loop import Evaluation, StepReport, evaluate, train_task

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

_HOMES = {
    "autorl": ("AutoConfig", "auto", "write_task"),
    "comparing.compare_models": ("compare_models",),
    "comparing.compared_models": ("BaseModel", "Checkpoint", "CompareConfig", "Endpoint", "OwnModel"),
    "judged": ("JudgedConfig", "JudgedResult"),
    "mcprl": ("McpRlConfig", "mcp_rl"),
    "training.comparison": ("CheckpointComparison", "ComparedScenario", "compare_checkpoints"),
    "training.progress": ("OnProgress", "Progress", "RecipeResult", "log_progress"),
    "training.recipe_config": ("RecipeConfig",),
    "training.task_training": ("TaskTrainingConfig", "TaskTrainingResult", "train"),
    "training.training_loop": ("Evaluation", "StepReport", "evaluate", "train_task"),
}
"""Names by the module that has them. Each is imported when a program first uses it."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"art_recipes.{module}"), name)
    raise AttributeError(f"module 'art_recipes' has no attribute {name!r}")
