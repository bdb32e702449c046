"""The registered models in memory, each with its host: the engine and the trainer of its base model."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from art.config import VllmConfig
from art.errors import CorruptCheckpointError, NotFoundError
from art.gateway.record.recorder import Recorder
from art.protocol.answers import EnginePressure
from art.protocol.training import ModelStatus, TokenCounts
from art.runtime.host import BaseModelHost, Hosts
from art.runtime.hosting.adapter_table import MAX_LOADED_FULL
from art.runtime.measurements import engine_pressure
from art.runtime.registry import RegisteredModel, Registry
from art.storage import checkpoints
from art.storage.layout import DataDir, ModelPaths


class Models:
    """Finds registered models by project and name."""

    def __init__(self, data_dir: DataDir, hosts: Hosts, recorder: Recorder, registry: Registry) -> None:
        self.data_dir = data_dir
        self._hosts = hosts
        self._recorder = recorder
        self._registry = registry
        self.by_key: dict[str, RegisteredModel] = {}
        """The models by `project/name`."""
        self.num_changes = 0
        """Changes of steps or settings so far. What was derived from a model is out of date after one."""

    def find(self, project: str, name: str) -> tuple[RegisteredModel, BaseModelHost]:
        """Return a registered model and the host of its base model.

        Raises:
            NotFoundError: the model is not registered.
        """
        model = self.by_key.get(f"{project}/{name}")
        if model is None:
            raise NotFoundError(f"there is no model {project}/{name}; register it first", param="name")
        return model, self._hosts.of(model)

    def paths(self, model: RegisteredModel) -> ModelPaths:
        return self.data_dir.model(model.project, model.name)

    def checkpoint(self, model: RegisteredModel, step: int) -> Path:
        return self.paths(model).checkpoint(step)

    def published(self, model: RegisteredModel, step: int) -> Path:
        """The folder of a checkpoint, after a check that it is the one that was published. Reads a file.

        Raises:
            CorruptCheckpointError: another checkpoint was put in its place.
        """
        path = self.checkpoint(model, step)
        recorded = self._registry.identity(model, step)
        if recorded is not None and path.is_dir() and (identity := checkpoints.identify(path)) != recorded:
            raise CorruptCheckpointError(
                f"step {step} of {model.key} is not the checkpoint that was published: its manifest has the sha256 "
                f"{identity[:12]}..., and {recorded[:12]}... was recorded. Put the published one back; to use another "
                "one, register it as a model of its own"
            )
        return path

    def folder(self, project: str, name: str, step: int, form: str | None = None) -> Path:
        """The folder of a published checkpoint, or of its export in the format `form`.

        Raises:
            NotFoundError: there is no such model, checkpoint or export.
        """
        model, _ = self.find(project, name)
        path = self.published(model, step) if form is None else self.paths(model).export(step, form)
        if step > model.step or not path.is_dir():
            what = "checkpoint" if form is None else f"export as {form!r}"
            raise NotFoundError(
                f"{model.key} has no {what} of step {step}; its newest step is {model.step}", param="step"
            )
        return path

    def replace(self, model: RegisteredModel) -> None:
        """Add a model, or replace everything but its steps: in the meantime a job may have published one, or somebody
        promoted one."""
        current = self.by_key.get(model.key, model)
        self.by_key[model.key] = dataclasses.replace(model, step=current.step, promoted_step=current.promoted_step)
        self.num_changes += 1

    def promoted_step(self, project: str, name: str) -> int:
        """Return the step that `project/name@promoted` means.

        Raises:
            NotFoundError: the model is not registered, or none of its checkpoints is promoted.
        """
        model, _ = self.find(project, name)
        if model.promoted_step is None:
            promoted = f"{model.key}@promoted"
            raise NotFoundError(
                f"there is no {promoted!r}: no checkpoint of {model.key} is promoted. Promote one with "
                f"`art checkpoints promote {model.key} --step STEP` or `await model.promote(step)`, or ask for "
                f"{model.key!r}, its newest step",
                param="model",
            )
        return model.promoted_step

    def set_promoted(self, key: str, step: int) -> None:
        """Make `step` the step that `project/name@promoted` means, after that was recorded."""
        self.by_key[key] = dataclasses.replace(self.by_key[key], promoted_step=step)
        self.num_changes += 1

    def set_step(self, key: str, step: int) -> None:
        """Make `step` the newest step of the model `key` (`project/name`), after its checkpoint was published."""
        self.by_key[key] = dataclasses.replace(self.by_key[key], step=step)
        self.num_changes += 1

    def list_all(self) -> list[ModelStatus]:
        return [status_of(model) for model in self.by_key.values()]

    async def pressure(self, project: str, name: str) -> EnginePressure:
        """Return how busy the engine of a model is for the project.

        Raises:
            NotFoundError: the model is not registered.
        """
        return await engine_pressure(self.find(project, name)[1], project)

    async def status(self, project: str, name: str) -> ModelStatus:
        """The status of a model with the number of tokens that it has read and sampled.

        Raises:
            NotFoundError: the model is not registered.
        """
        status = status_of(self.find(project, name)[0])
        prompt, cached, completion = await asyncio.to_thread(self._recorder.token_counts, project, name)
        return status.model_copy(update={"tokens": TokenCounts(prompt=prompt, cached=cached, completion=completion)})


def status_of(model: RegisteredModel) -> ModelStatus:
    engine = model.settings.engine
    return ModelStatus(
        project=model.project, name=model.name, base_model=model.base_model, step=model.step, inference_name=model.key,
        created_at=model.created_at, serves_base=not (isinstance(engine, VllmConfig) and engine.weights == "merged"),
        promoted_step=model.promoted_step, steps_at_once=_steps_at_once(model),
    )  # fmt: skip


def _steps_at_once(model: RegisteredModel) -> int | None:
    """Number of steps of a model that its engine can serve at the same time; `None` for any number of adapters."""
    engine = model.settings.engine
    if isinstance(engine, VllmConfig) and engine.weights == "merged":
        return 1
    return MAX_LOADED_FULL if model.settings.lora is None else None
