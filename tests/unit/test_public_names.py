"""The public names and their signatures: what users' code depends on. A change here is a change for them."""

from __future__ import annotations

import importlib
import inspect

import pytest

import art

NAMES = {
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
}

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
    "art.utils.benchmarking.charts": ["percentage_comparison_bar_chart", "training_progress_chart"],
    "art.utils.benchmarking.load_trajectories": ["load_trajectories"],
    "art.utils.benchmarking.types": ["BenchmarkModelKey"],
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
    "art.client": ["ArtClient"],
    "art.mcp": [
        "GeneratedScenario",
        "GeneratedScenarioCollection",
        "MCPResource",
        "MCPTool",
        "complete_task_tool",
        "generate_scenarios",
    ],
    "art.mcp.generate_scenarios": ["preview_scenarios"],
    "art.scenarios": [
        "Dataset",
        "TaskText",
        "WrittenScenario",
        "generate_dataset",
        "generate_inputs",
        "measure_diversity",
    ],
    "art.rewards": ["DEFAULT_RUBRIC", "TrajectoryScore", "ruler", "ruler_score_group"],
}

PARAMETERS = {
    "art.gather_trajectory_groups": "groups pbar_desc pbar_total_completion_tokens max_exceptions max_metrics after_each "
    "faults rollout_timeout_s",
    "art.gather_trajectories": "trajectories pbar_desc pbar_total_completion_tokens max_exceptions faults "
    "rollout_timeout_s",
    "art.trajectory_group_batches": "groups batch_size max_batch_exceptions max_concurrent_batches skip_batches pbar_desc "
    "pbar_total_completion_tokens faults rollout_timeout_s",
    "art.retry": "max_attempts delay backoff_factor exceptions on_retry jitter",
    "art.utils.iterate_dataset": "dataset groups_per_step num_epochs initial_step use_tqdm seed",
    "art.utils.limit_concurrency": "n derive_key",
    "art.Model.log": "self trajectories split metrics step",
    "art.TrainableModel.train": "self trajectory_groups config _config verbose on_nothing",
    "art.TrainableModel.train_sft": "self trajectories config _config verbose",
    "art.TrainableModel.delete_checkpoints": "self best_checkpoint_metric",
    "art.TrainableModel.get_inference_name": "self step",
    "art.TrainableModel.litellm_completion_params": "self step",
    "art.Backend.train": "self model trajectory_groups config learning_rate loss_fn loss_fn_config scale_rewards "
    "normalize_advantages num_minibatches on_nothing verbose further",
    "art.Backend.train_sft": "self model trajectories config verbose",
}

FIELDS = {
    "Trajectory": "messages_and_choices tools additional_histories reward turn_rewards token_rewards "
    "initial_policy_version final_policy_version metrics metadata logs start_time",
    "TrajectoryGroup": "trajectories exceptions metadata metrics logs",
    "PydanticException": "type message traceback",
    "TrainableModel": "name project entity id config inference_api_key inference_base_url inference_model_name base_path "
    "report_metrics prices budget_usd base_model settings run_id",
}


def test_names_of_the_package() -> None:
    assert set(art.__all__) == NAMES
    for name in NAMES:
        assert getattr(art, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = art.no_such_name


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
