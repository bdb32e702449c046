"""What the core asks when it meets an older spelling: modules, names, options and words of code for ART 0.3 to 0.5.

docs/older_code.md lists all of them. The core finds this module as the entry point `older` of the group `art.names`.

older          modules and names, those that no longer exist with what to use today; `backend._experimental_...`
dev            the dictionaries of `art.dev`, and `_internal_config`
train_words    older words of `train`
metrics        `model.metrics_builder()` and `track_api_cost`
utils, sft, types     modules of `art`, by the table `ALIASES`
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal, NoReturn

from art.client.checkpoint_client import Checkpoints, NamedModel
from art.errors import ConfigError, NotFoundError
from art.protocol.checkpoint_calls import S3Target
from openpipe_art.dev import in_older_names, optimizer_from_internal_config, settings_from_internal_config
from openpipe_art.train_words import drop_older_fields, train_config, with_nested

__all__ = [
    "drop_older_fields", "find_experimental", "find_module", "find_name", "in_older_names",
    "optimizer_from_internal_config", "settings_from_internal_config", "train_config", "with_nested",
]  # fmt: skip

logger = logging.getLogger(__name__)

# -- modules --

_IN_UTILS = (
    "format_message", "get_model_step", "get_repo_root_path", "iterate_dataset", "limit_concurrency", "litellm",
    "logging", "retry", "strip_logprobs",
)  # fmt: skip
ALIASES = {
    "art.dev": "openpipe_art.dev",
    "art.guided_completion": "openpipe_art.utils",
    "art.local": "art.local_backend",
    "art.local.backend": "art.local_backend",
    "art.serverless": "art_cloud.serverless_backend",
    "art.serverless.backend": "art_cloud.serverless_backend",
    "art.skypilot": "art_cloud.skypilot_backend",
    "art.testing.generator": "art_recipes.scripted_generator",
    "art.trajectories": "openpipe_art.types",
    "art.types": "openpipe_art.types",
    "art.utils": "openpipe_art.utils",
    **{f"art.utils.{name}": "openpipe_art.utils" for name in _IN_UTILS},
    "art.utils.sft": "openpipe_art.sft",
}
"""Where the modules of older code are today."""


class _AliasLoader(Loader):
    """Loads an older module as the module that has its names today."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(ALIASES[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        alias, module.__spec__ = module.__spec__.name, self._spec  # Python had put the alias there
        # Python would look for submodules in a folder, and put each in place of the function that has its name.
        for name, target in ALIASES.items():
            parent, _, child = name.rpartition(".")
            if name.startswith(f"{alias}."):
                sys.modules[name] = importlib.import_module(target)
                if not hasattr(sys.modules[parent], child):
                    setattr(sys.modules[parent], child, sys.modules[name])


def find_module(name: str) -> ModuleSpec | None:
    """Return how to load a module of older code; `None` for any other.

    Raises:
        ModuleNotFoundError: it no longer exists; the message says what to use today.
    """
    if advice := MODULES.get(name):
        raise ModuleNotFoundError(f"{name} does not exist in this version of ART: {advice}", name=name)
    return ModuleSpec(name, _AliasLoader()) if name in ALIASES else None


# -- names --

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
    "backend": {
        "_experimental_deploy": _DEPLOY,
        "_experimental_pull_model_checkpoint": "use `await backend.download_checkpoint(model, folder, step=...)`, "
        'after `await backend.pull(model, "s3://bucket/prefix")` if it is in a bucket',
    },
    "art.utils": dict.fromkeys(("deploy_model", "LoRADeploymentProvider", "LoRADeploymentJob"), _DEPLOY),
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
    "art.utils.benchmarking": _FILES + "; the page (`art view`) and `art compare` show models side by side, and "
    "`await model.log(metrics=..., step=...)` adds metrics",
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


def find_name(name: str) -> Any:
    """Return what `art.<name>` gave in older code.

    Raises:
        ImportError, AttributeError: see `refuse`.
    """
    if f"art.{name}" in ALIASES:
        return importlib.import_module(f"art.{name}")
    if name == "LocalTrainResult":
        return importlib.import_module("art").TrainResult
    return refuse("art", name)


# -- checkpoints --


async def experimental_fork_checkpoint(
    checkpoints: Checkpoints,
    model: NamedModel,
    from_model: str,
    from_project: str | None = None,
    from_s3_bucket: str | None = None,
    not_after_step: int | None = None,
    verbose: bool = False,
    prefix: str | None = None,
) -> None:
    """Begin `model` with a checkpoint of another model, by `checkpoints.fork`, or by `pull` if a bucket is given."""
    if from_s3_bucket is None:
        await checkpoints.fork(
            model, from_model, from_project=from_project, not_after_step=not_after_step, show=verbose
        )
    else:
        await checkpoints.pull(
            model, S3Target(bucket=from_s3_bucket, prefix=prefix or ""), from_model=from_model,
            from_project=from_project, not_after_step=not_after_step, show=verbose,
        )  # fmt: skip


async def experimental_push_to_s3(
    checkpoints: Checkpoints,
    model: NamedModel,
    *,
    s3_bucket: str | None = None,
    prefix: str | None = None,
    verbose: bool = False,
    delete: bool = False,
) -> None:
    """Push the model's newest checkpoint to an S3 bucket.

    Raises:
        ConfigError: `delete` is set, or no bucket is given, neither here nor as BACKUP_BUCKET.
    """
    await checkpoints.push(model, _target(s3_bucket, prefix, delete), show=verbose)


async def experimental_pull_from_s3(
    checkpoints: Checkpoints,
    model: NamedModel,
    *,
    s3_bucket: str | None = None,
    prefix: str | None = None,
    verbose: bool = False,
    delete: bool = False,
    only_step: int | Literal["latest"] | None = None,
    step: int | None = None,
    exclude: list[str] | None = None,
    latest_only: bool = False,
) -> None:
    """Pull one checkpoint of the model from an S3 bucket: the given step, or the newest if there is one.

    Raises:
        ConfigError: `delete` is set, no bucket is given, or `exclude` names anything but logs and trajectories, which
            are never pulled.
    """
    source = _target(s3_bucket, prefix, delete)
    if not latest_only and only_step is None and step is None:
        logger.info("only the newest checkpoint is pulled, as with latest_only=True")
    if unknown := sorted(set(exclude or ()) - {"logs", "trajectories"}):
        raise ConfigError(f"only a checkpoint is pulled; `exclude` cannot leave out {', '.join(unknown)}")
    chosen = step if only_step in (None, "latest") else only_step
    try:
        await checkpoints.pull(model, source, step=chosen, show=verbose)  # type: ignore[arg-type]
    except NotFoundError as error:
        if chosen is not None:
            raise
        logger.warning("nothing is pulled, and the model begins as it is: %s", error)  # the first run of a script


def find_experimental(name: str, checkpoints: Checkpoints) -> Callable[..., Any]:
    """Return the method `backend._experimental_...` of this name.

    Raises:
        AttributeError, ImportError: there is none; the message says what to use today.
    """
    methods = (experimental_fork_checkpoint, experimental_pull_from_s3, experimental_push_to_s3)
    method = next((method for method in methods if name == f"_{method.__name__}"), None)
    return refuse("backend", name) if method is None else partial(method, checkpoints)


def _target(bucket: str | None, prefix: str | None, delete: bool) -> S3Target:
    if delete:
        raise ConfigError("delete=True is not supported: nothing is ever deleted in the bucket or on the server")
    bucket = bucket or os.environ.get("BACKUP_BUCKET")
    if not bucket:
        raise ConfigError("no bucket: pass s3_bucket, or set BACKUP_BUCKET")
    return S3Target(bucket=bucket, prefix=prefix or "")
