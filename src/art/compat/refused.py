"""Names of older code that no longer exist, each with what to use today.

A module refuses its names by `__getattr__ = refusals(__name__)`, so that the error of
`from art import TinkerBackend` says what to use.
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
    "art.utils": dict.fromkeys(("deploy_model", "LoRADeploymentProvider", "LoRADeploymentJob"), _DEPLOY),
    "art.utils.deployment": dict.fromkeys(
        ("deploy_model", "DeploymentConfig", "DeploymentResult", "Provider", "TogetherDeploymentConfig",
         "WandbDeploymentConfig"), _DEPLOY,
    ),
    "art.utils.s3": dict.fromkeys(
        ("archive_and_presign_step_url", "build_s3_path", "ensure_bucket_exists", "pull_model_from_s3",
         "push_model_to_s3", "s3_sync"), _STORE,
    ),
    "art.utils.benchmarking": {
        "pull_model_trajectories": _FILES + "; logs of models are kept where the script runs, and not in buckets",
        "log_constant_metrics_wandb": "use `await model.log(metrics=..., step=...)`; `Model(report_metrics=['wandb'])` "
        "sends it to W&B",
    },
}  # fmt: skip
"""What to use today, by module and older name."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module does not have.

    Raises:
        ImportError: it is an older name; the message says what to use today.
        AttributeError: it is any other name.
    """
    if advice := REFUSED.get(module, {}).get(name):
        raise ImportError(f"{module}.{name} does not exist in this version of ART: {advice}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def refusals(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module, whose errors say what to use in place of older names."""
    return lambda name: refuse(module, name)
