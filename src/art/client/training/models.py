"""What a backend reads of a model, and what it returns for one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from art.client.checkpoint_client import NamedModel
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.errors import ConfigError
from art.protocol.training import JobId, ModelStatus

_C = TypeVar("_C", TrainConfig, TrainSFTConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Address, key and state of a model on the server, as `register` returns them."""

    server_url: str | None
    """Address of the ART server; `None` for a service that is none, which has an `inference_base_url`."""
    api_key: str | None
    status: ModelStatus
    inference_base_url: str | None = None
    """Base URL of chat requests; `None` for that of the model's project on the server."""
    asks_logprobs: bool = False
    """Whether chat requests must ask for log-probs, because no server records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training step made: a checkpoint, which is served now, and numbers about the step."""

    step: int
    """Step (number) of the checkpoint."""
    trained: bool = True
    """False if there was nothing to learn from. Then `step` and `checkpoint_path` are unchanged, and the first of
    `findings` says why."""
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """Remarks about the step in plain words: groups that were left out and why, numbers out of range."""
    checkpoint_path: str | None = None
    """Folder of the checkpoint on the server's disk."""


class BackendModel(NamedModel, Protocol):
    """Interface of a model, with the attributes that a backend reads."""

    @property
    def trainable(self) -> bool: ...

    def default_optimizer(self) -> OptimizerConfig | None:
        """Return the optimiser settings for training steps that set none; `None` for ART's default."""
        ...

    async def record_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep settings of the run by sections, for its page and the trackers."""
        ...


class TrainableBackendModel(BackendModel, Protocol):
    """Interface of a model that a backend can train."""

    @property
    def base_model(self) -> str: ...

    def model_settings(self) -> ModelSettings:
        """Return the settings of adapter, engine, trainer and rendering to register the model with."""
        ...


def name_of(model: NamedModel) -> str:
    """Return the full name of a model, `project/name`."""
    return f"{model.project}/{model.name}"


def with_optimizer(config: _C, model: BackendModel) -> _C:
    """Return `config` with the model's own optimiser, if it has one and `config` sets none."""
    optimizer = model.default_optimizer()
    if optimizer is None or "optimizer" in config.model_fields_set:
        return config
    return config.model_copy(update={"optimizer": optimizer})


def absolute_path(base_model: str) -> str:
    """Return the absolute path of a folder, so that it names the same model from every working directory.

    Raises:
        ConfigError: `base_model` is empty, or a path to something else than a model.
    """
    from art.config.base_models import find_folder

    folder = find_folder(base_model)
    return base_model if folder is None else os.path.abspath(folder)


def check_job_id(job_id: str | None) -> str:
    """Return the name of a job, or make one.

    Raises:
        ConfigError: it is not a valid name.
    """
    if job_id is None:
        return uuid.uuid4().hex
    from pydantic import TypeAdapter  # few programs name their jobs

    try:
        return TypeAdapter(JobId).validate_python(job_id)
    except ValidationError as error:
        raise ConfigError(
            "`job_id` must be 8 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit; got "
            f"{job_id!r}",
            param="job_id",
        ) from error
