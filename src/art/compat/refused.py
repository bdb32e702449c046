"""Names of older code that no longer exist, each with what to use today.

A module refuses its names by `__getattr__ = refusals(__name__)`, so that the error of `from art import TinkerBackend`
says what to use. Whole modules are refused by `refuse_module`, however they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_SERVER = "start `art-server` on the machine with the GPU, and use `art.RemoteBackend(base_url, api_key)` here"
_STORE = (
    'use `await backend.push(model, "s3://bucket/prefix")` and `await backend.pull(model, "s3://bucket/prefix")`; the '
    "server needs the extra `s3`"
)
_DEPLOY = (
    'use `await backend.export(model, "peft")`, or "merged", and `await backend.push(model, "hf://owner/name", '
    'format="peft")`; a provider such as Together or W&B takes the adapter from there'
)
_FILES = "read `trajectories/<split>/<step>.jsonl` with `art.storage.trajectories.read_groups(path)`"
_PIPELINE = "use `art.trajectory_group_batches(groups, batch_size=...)`, which trains while later groups still run"

REFUSED: dict[str, dict[str, str]] = {
    "art": {
        **dict.fromkeys(("TinkerBackend", "TinkerNativeBackend"), _SERVER),
        "MegatronBackend": "use `art.LocalBackend`; `TrainerConfig(num_processes=...)` trains on several GPUs",
        "PipelineTrainer": _PIPELINE,
        "make_group_rollout_fn": _PIPELINE,
    },
    "backend": {"_experimental_deploy": _DEPLOY},
    "art.utils": dict.fromkeys(("deploy_model", "LoRADeploymentProvider", "LoRADeploymentJob"), _DEPLOY),
    "art.utils.benchmarking": {
        "pull_model_trajectories": _FILES + "; logs of models are kept where the script runs, and not in buckets",
        "log_constant_metrics_wandb": "use `await model.log(metrics=..., step=...)`; `Model(report_metrics=['wandb'])` "
        "sends it to W&B",
    },
}  # fmt: skip
"""What to use today, by module and older name."""
_OURS = "ART uses transformers and peft for all models; settings are `TrainableModel(settings=art.ModelSettings(...))`"
MODULES: dict[str, str] = {
    "art.distill": "use `backend.train(..., loss=...)` with the losses of docs/objectives.md",
    "art.megatron": REFUSED["art"]["MegatronBackend"],
    "art.pipeline_trainer": "use `art.pipeline(...)`, which trains while rollouts run",
    "art.preprocessing": "the server tokenizes; a request with `extra_body={'return_token_ids': True}` gets the ids",
    "art.tinker": _SERVER,
    "art.tinker_native": _SERVER,
    "art.unsloth": _OURS,
    "art.utils.deployment": _DEPLOY,
    "art.utils.s3": _STORE,
    "art.utils.s3_checkpoint_utils": _STORE,
    "art.utils.trajectory_logging": _FILES,
    "art.utils.trajectory_migration": _FILES,
    "art.vllm": "use `TrainableModel(settings=art.ModelSettings(engine=art.VllmConfig(...)))`",
}
"""What to use today, by module of older code that does not exist."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module does not have.

    Raises:
        ImportError: it is an older name; the message says what to use today.
        AttributeError: it is any other name.
    """
    if advice := REFUSED.get(module, {}).get(name):
        raise ImportError(f"{module}.{name} does not exist in this version of ART: {advice}", name=module)
    raise AttributeError(f"{module!r} has no attribute {name!r}")


def refuse_module(module: str) -> None:
    """Raise the error for a module of older code that does not exist; do nothing for any other.

    Raises:
        ModuleNotFoundError: the message says what to use today.
    """
    if advice := MODULES.get(module):
        raise ModuleNotFoundError(f"{module} does not exist in this version of ART: {advice}", name=module)


def refusals(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module, whose errors say what to use in place of older names."""
    return lambda name: refuse(module, name)
