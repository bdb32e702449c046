"""What names in requests mean: registered models with their hosts (`Models`), and policies (`PolicyResolver`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from pathlib import Path

from art.config import SamplingConfig, VllmConfig
from art.config.base_models import SHORT_NAMES
from art.errors import ArtError, CorruptCheckpointError, NotFoundError
from art.gateway.policies import PolicyRef, find_model, parse_model_name
from art.protocol.training import ModelStatus, TokenCounts
from art.record.recorder import Recorder
from art.runtime.hosting.adapter_table import MAX_LOADED_FULL
from art.runtime.hosting.host import BaseModelHost, Hosts
from art.runtime.registry import RegisteredModel, Registry
from art.storage import checkpoints
from art.storage.layout import DataDir, ModelPaths

ENGINE_TIMEOUT_S = 1.0
"""Longest wait for the counters of an engine. An engine that takes longer is left out."""


class Models:
    """Finds registered models by project and name."""

    def __init__(self, data_dir: DataDir, hosts: Hosts, recorder: Recorder, registry: Registry) -> None:
        self.data_dir = data_dir
        self._hosts = hosts
        self._recorder = recorder
        self.registry = registry
        self.by_key: dict[str, RegisteredModel] = {}
        """The models by `project/name`."""
        self.num_changes = 0
        """Changes of steps or settings so far. What was derived from a model is out of date after one."""

    def find(self, project: str, name: str) -> tuple[RegisteredModel, BaseModelHost]:
        """Return a registered model and the host of its base model. Raises `NotFoundError` if the model is not
        registered."""
        model = self.by_key.get(f"{project}/{name}")
        if model is None:
            raise NotFoundError(f"there is no model {project}/{name}; register it first", param="name")
        return model, self._hosts.of(model)

    def paths(self, model: RegisteredModel) -> ModelPaths:
        return self.data_dir.model(model.project, model.name)

    def checkpoint(self, model: RegisteredModel, step: int) -> Path:
        return self.paths(model).checkpoint(step)

    def published(self, model: RegisteredModel, step: int) -> Path:
        """The folder of a checkpoint, after a check that it is the one that was published. Reads a file. Raises
        `CorruptCheckpointError` if another checkpoint was put in its place."""
        path = self.checkpoint(model, step)
        recorded = self.registry.identity(model, step)
        if recorded is not None and path.is_dir() and (identity := checkpoints.identify(path)) != recorded:
            raise CorruptCheckpointError(
                f"step {step} of {model.key} is not the checkpoint that was published: its manifest has the sha256 "
                f"{identity[:12]}..., and {recorded[:12]}... was recorded. Put the published one back; to use another "
                "one, register it as a model of its own"
            )
        return path

    def folder(self, project: str, name: str, step: int, form: str | None = None) -> Path:
        """The folder of a published checkpoint, or of its export in the format `form`. Raises `NotFoundError` if there
        is no such model, checkpoint or export."""
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
        """Return the step that `project/name@promoted` means. Raises `NotFoundError` if the model is not registered, or
        none of its checkpoints is promoted."""
        model, _ = self.find(project, name)
        if model.promoted_step is None:
            raise NotFoundError(
                f"no checkpoint of {model.key} is promoted, so there is no '{model.key}@promoted'. Promote one with "
                f"`art promote {model.key}@STEP` or `await model.promote(step)`, or ask for {model.key!r}, its newest",
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

    async def status(self, project: str, name: str) -> ModelStatus:
        """The status of a model with the number of tokens that it has read and sampled. Raises `NotFoundError` if the
        model is not registered."""
        model, host = self.find(project, name)
        context = (await host.engine_info()).max_context if host.engine.state == "up" else None
        prompt, cached, completion = await asyncio.to_thread(self._recorder.usage.token_counts, project, name)
        tokens = TokenCounts(prompt=prompt, cached=cached, completion=completion)
        return status_of(model).model_copy(update={"tokens": tokens, "max_context": context})


def status_of(model: RegisteredModel) -> ModelStatus:
    engine = model.settings.engine
    one_policy = isinstance(engine, VllmConfig) and engine.weights == "merged"
    return ModelStatus(
        project=model.project, name=model.name, base_model=model.base_model, step=model.step, inference_name=model.key,
        created_at=model.created_at, serves_base=not one_policy, promoted_step=model.promoted_step,
        steps_at_once=1 if one_policy else MAX_LOADED_FULL if model.settings.lora is None else None,
    )  # fmt: skip


async def engine_stats(host: BaseModelHost) -> dict[str, float]:
    """Return the numbers of an engine; none if it is not up or does not answer within `ENGINE_TIMEOUT_S`."""
    if host.engine.state != "up":
        return {}
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            return await host.engine.stats()
    except (TimeoutError, ArtError):
        return {}


class PolicyResolver:
    """Finds the policy that a model name means, for the gateway. It caches policies until a model changes."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._policies: dict[str, PolicyRef] = {}
        self._num_changes = 0
        """`Models.num_changes` for which the cached policies hold."""

    def is_ready(self, policy: PolicyRef) -> bool:
        """Whether the policy can be sampled from right now."""
        if policy.adapter is None:
            return True
        _, host = self._models.find(policy.project, policy.name)
        return host.adapters.is_loaded(policy.adapter)

    def resolve_ready(self, model: str) -> PolicyRef | None:
        """Return the policy that a model name means, if it is cached and can be sampled from right now; else `None`."""
        policy = self._policies.get(model) if self._num_changes == self._models.num_changes else None
        return policy if policy is not None and self.is_ready(policy) else None

    async def resolve(self, model: str) -> PolicyRef:
        """Find the policy that `project/name`, `name`, or one of them with `@step` or `@promoted` means. Load its
        adapter if the engine dropped it.

        The name of a registered model's base model means that base model without any training. Raises `NotFoundError`
        if the model or step is unknown, nothing is promoted, or two projects have a model of this name.
        """
        num_changes = self._models.num_changes
        try:
            asked = parse_model_name(model)
            key = find_model(asked, ((known.project, known.name) for known in self._models.by_key.values()))
        except NotFoundError:
            project, _, name = model.partition("/")
            if (based := self._based_on(name, project) or self._based_on(model)) is None:
                raise
            _, host = self._models.find(based.project, based.name)
            if host.one_policy:
                raise NotFoundError(
                    f'{based.base_model} is not served: with `weights="merged"` vLLM holds one step of {based.key} at '
                    'a time. Its untrained base model beside it needs `weights="lora"` or the embedded engine',
                    param="model",
                ) from None
            # Its answers are recorded under its own name, so no model learns from them.
            policy = await _make_policy(host, None, (based.project, based.base_model), 0)
        else:
            registered, host = self._models.find(*key)
            asked_step = self._models.promoted_step(*key) if asked.step == "promoted" else asked.step
            step = registered.step if asked_step is None else asked_step
            checkpoint = self._models.checkpoint(registered, step)
            if step > registered.step or not checkpoint.exists():
                self._models.registry.check_file()
                what = f"step {step}, which is promoted" if asked.step == "promoted" else f"step {step}"
                raise NotFoundError(
                    f"model {registered.key!r} has no published checkpoint of {what}; the newest is {registered.step}",
                    param="model",
                )
            await asyncio.to_thread(self._models.published, registered, step)
            if host.one_policy:
                step = await self._only_step(registered, host, asked_step)
            else:
                await host.adapters.load(registered.adapter_id(step), checkpoint)
            sampling = registered.settings.sampling
            policy = await _make_policy(host, registered.adapter_id(step), key, step, sampling)
        # Cache it, unless e.g. a step was published meanwhile.
        if num_changes == self._models.num_changes:
            if self._num_changes != num_changes:
                self._policies.clear()
                self._num_changes = num_changes
            self._policies[model] = policy
        return policy

    def name_in(self, project: str, model: str) -> str | None:
        """Return the full name, `project/name`, of what a project calls `model`: one of its models, or the base model
        of one. `None` if the project has neither."""
        with contextlib.suppress(NotFoundError):
            asked = parse_model_name(model)
            if asked.project in (None, project) and f"{project}/{asked.name}" in self._models.by_key:
                return model if asked.project else f"{project}/{model}"
        return f"{project}/{model}" if self._based_on(model, project) else None

    def _based_on(self, base_model: str, project: str | None = None) -> RegisteredModel | None:
        """The first registered model with this base model (hub id, short name or folder), in one project or in all."""
        spellings = {
            base_model,
            SHORT_NAMES.get(base_model.lower(), base_model),
            os.path.abspath(os.path.expanduser(base_model)),
        }
        models = (model for _, model in sorted(self._models.by_key.items()) if project in (None, model.project))
        return next((model for model in models if model.base_model in spellings), None)

    async def _only_step(self, model: RegisteredModel, host: BaseModelHost, asked: int | None) -> int:
        """The step that the engine holds. A job may have published it without having recorded it yet; answers that are
        sampled now come from that step."""
        newest = self._models.checkpoint(model, model.step)
        step = int((await host.adapters.ensure_loaded(model.adapter_id(model.step), newest)).rpartition("@")[2])
        if asked not in (None, step):
            raise NotFoundError(
                f'{model.key}@{asked} is not served: with `weights="merged"` vLLM holds one step at a time, now step '
                f'{step}. Ask for {model.key!r}; older steps beside it need `weights="lora"` or the embedded engine',
                param="model",
            )
        return step


async def _make_policy(
    host: BaseModelHost, adapter: str | None, name: tuple[str, str], step: int, sampling: SamplingConfig | None = None
) -> PolicyRef:
    """`name` is the project and the name under which answers are recorded."""
    info = await host.engine_info()
    return PolicyRef(
        engine=host.engine, renderer=await host.renderer(), adapter=adapter, project=name[0], name=name[1],
        policy_version=step, max_context=info.max_context, longest_context=info.longest_context, sampling=sampling,
    )  # fmt: skip
