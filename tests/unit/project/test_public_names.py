"""The public names and their signatures: what users' code depends on. A change here is a change for them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import art

ROOT = Path(__file__).parents[3]

NAMES = {
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
    "current_trajectory",
    "no_capture",
    "trajectory_group",
    "capture",
    "config",
    "errors",
    "gather_trajectories",
    "gather_trajectory_groups",
    "get_task",
    "langgraph",
    "mcp",
    "pipeline",
    "recipes",
    "register_task",
    "rewards",
    "scenarios",
    "trajectory_group_batches",
}

ELSEWHERE_IN_ART = [
    "LocalTrainResult", "Message", "MessageOrChoice", "Messages", "MessagesAndChoices", "PydanticException", "Tools",
    "capture_auto_trajectory", "capture_yielded_trajectory", "dev", "gather", "retry", "trajectories", "types", "utils",
    "yield_trajectory",
]  # fmt: skip
"""Importable, for older code or rarely needed; not in `art.__all__`."""

ELSEWHERE = {
    "art.gather": ["GatherContext", "get_gather_context", "set_gather_context", "wrap_group_awaitable"],
    "art.utils": [
        "DatasetBatch",
        "format_message",
        "get_model_step",
        "get_repo_root_path",
        "iterate_dataset",
        "limit_concurrency",
        "litellm",
        "retry",
        "strip_logprobs",
    ],
    "art.utils.litellm": ["convert_litellm_choice_to_openai"],
    "art.dev": [
        "EngineArgs",
        "InitArgs",
        "InternalModelConfig",
        "PeftArgs",
        "TrainConfig",
        "TrainSFTConfig",
        "TrainerArgs",
    ],
    "art.langgraph": ["init_chat_model", "wrap_rollout"],
    "art.local": ["LocalBackend"],
    "art.local.backend": ["LocalBackend"],
    "art.metrics": ["MetricsBuilder", "track_api_cost"],
    "art.serverless": ["ServerlessBackend"],
    "art.serverless.backend": ["ServerlessBackend"],
    "art.trajectories": ["History", "PydanticException", "Trajectory", "TrajectoryGroup", "get_messages"],
    "art.types": [
        "LocalTrainResult",
        "Message",
        "MessageOrChoice",
        "Messages",
        "MessagesAndChoices",
        "Tools",
        "TrainConfig",
        "TrainResult",
        "TrainSFTConfig",
        "Verbosity",
    ],
    "art.utils.get_repo_root_path": ["get_repo_root_path"],
    "art.utils.sft": [
        "SFTChunk",
        "create_lr_schedule",
        "create_sft_dataset_iterator",
        "get_file_row_count",
        "iterate_file",
        "resolve_sft_batch_size",
        "train_sft_from_file",
    ],
    "art.utils.strip_logprobs": ["strip_logprobs"],
    "art.client.client": ["ServerClient"],
    "art_recipes.mcp": [
        "GeneratedScenario",
        "GeneratedScenarioCollection",
        "MCPResource",
        "MCPTool",
        "complete_task_tool",
        "generate_scenarios",
    ],
    "art_recipes.mcp.generate_scenarios": ["preview_scenarios"],
    "art_recipes.scenarios": [
        "Dataset",
        "TaskText",
        "WrittenScenario",
        "generate_dataset",
        "generate_inputs",
    ],
    "art.rewards": ["DEFAULT_RUBRIC", "TrajectoryScore", "ruler", "ruler_score_group"],
}

PARAMETERS = {
    "art.gather_trajectory_groups": "groups pbar_desc max_exceptions max_metrics after_each faults "
    "rollout_timeout_s workers pbar_total_completion_tokens",
    "art.gather_trajectories": "trajectories pbar_desc max_exceptions faults rollout_timeout_s workers pbar_total_completion_tokens",
    "art.trajectory_group_batches": "groups batch_size max_batch_exceptions max_concurrent_batches skip_batches pbar_desc "
    "faults rollout_timeout_s pbar_total_completion_tokens",
    "art.retry": "max_attempts delay backoff_factor exceptions on_retry",
    "art.utils.iterate_dataset": "dataset groups_per_step num_epochs initial_step use_tqdm seed",
    "art.utils.limit_concurrency": "n derive_key",
    "art.Model.log": "self trajectories split metrics step row_id",
    "art.TrainableModel.train": "self trajectory_groups config sft verbose settings",
    "art.TrainableModel.train_sft": "self trajectories config verbose settings",
    "art.TrainableModel.delete_checkpoints": "self best_checkpoint_metric",
    "art.TrainableModel.get_inference_name": "self step",
    "art.TrainableModel.litellm_completion_params": "self step",
    "art.Backend.train": "self model trajectory_groups config sft verbose wait on_nothing job_id settings",
    "art.Backend.train_sft": "self model trajectories config verbose wait job_id settings",
}

FIELDS = {
    "Trajectory": "messages_and_choices tools additional_histories reward turn_rewards token_rewards "
    "initial_policy_version final_policy_version metrics metadata logs start_time",
    "TrajectoryGroup": "trajectories exceptions metadata metrics logs",
    "PydanticException": "type message traceback",
    "TrainableModel": "name project config inference_api_key inference_base_url inference_model_name base_path prices "
    "budget_usd report_metrics base_model settings",
}


def test_names_of_the_package() -> None:
    assert set(art.__all__) == NAMES
    for name in [*NAMES, *ELSEWHERE_IN_ART]:
        assert getattr(art, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = art.no_such_name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_in_the_documentation(name: str) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert any(re.search(rf"\bart\.{name}\b", page.read_text()) for page in pages), f"no page names art.{name}"


@pytest.mark.parametrize("path", sorted((ROOT / "src/art/model").glob("*.py")), ids=lambda path: path.name)
def test_a_model_asks_its_backend_by_public_names(path: Path) -> None:
    private = [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if "backend" in ast.unparse(node.value)
    ]
    assert not private


@pytest.mark.parametrize("module", ELSEWHERE)
def test_names_of_modules(module: str) -> None:
    for name in ELSEWHERE[module]:
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters(path: str) -> None:
    value: object = art
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    assert callable(value)
    assert " ".join(inspect.signature(value).parameters) == PARAMETERS[path]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    assert " ".join(getattr(art, name).model_fields) == FIELDS[name]
