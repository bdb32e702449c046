"""Functions that run a complete training, from a task, a sentence or an MCP server, and return the trained model.

    result = await art.recipes.auto("Answer the questions of guests", "./tiny", judge="openai/o3", on_progress=print)
    print(result.verdict.what, result.report_path)

The commands `art train`, `art auto` and `art mcp-rl` call these functions (recipes) and print their progress. A recipe
starts a `LocalBackend` of its own and runs in the event loop of the caller, so a notebook can await it.
"""

from typing import TYPE_CHECKING, Any

from art.plugins import load_plugin
from art.recipes.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art.recipes.progress import OnProgress, Progress, RecipeResult, log_progress
from art.recipes.recipe_config import RecipeConfig
from art.recipes.task_training import TaskTrainingConfig, TaskTrainingResult, train
from art.recipes.training_loop import Evaluation, StepReport, evaluate, train_task

if TYPE_CHECKING:
    from art_recipes.autorl import AutoConfig, auto, write_task
    from art_recipes.comparing.compare_models import compare_models
    from art_recipes.comparing.compared_models import BaseModel, Checkpoint, CompareConfig, Endpoint, OwnModel
    from art_recipes.judged import JudgedConfig, JudgedResult
    from art_recipes.mcprl import McpRlConfig, mcp_rl

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


def __getattr__(name: str) -> Any:
    """Load names that `art train` does not need. They bring judges, MCP and other models."""
    if name not in __all__:
        raise AttributeError(f"module 'art.recipes' has no attribute {name!r}")
    return load_plugin("art.names", f"recipes.{name}")
