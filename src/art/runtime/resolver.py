"""Find the policy that a model name in a request means, and the engine that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from art.config import SamplingConfig
from art.config.base_models import SHORT_NAMES
from art.errors import NotFoundError
from art.gateway.policies import PolicyRef, find_model, parse_model_name
from art.runtime.host import BaseModelHost
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel


class PolicyResolver:
    """Finds the policy that a model name means, for the gateway. It caches policies until a model changes."""

    def __init__(self, models: Models, check_directory: Callable[[], None] = lambda: None) -> None:
        """`check_directory` raises a `StorageError` if the data directory is gone."""
        self._check_directory = check_directory
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

        The name of a registered model's base model means that base model without any training.

        Raises:
            NotFoundError: the model or step is unknown, nothing is promoted, or two projects have a model of this name.
            StorageError: the data directory is gone.
        """
        num_changes = self._models.num_changes
        try:
            asked = parse_model_name(model)
            key = find_model(asked, ((known.project, known.name) for known in self._models.by_key.values()))
        except NotFoundError:
            project, _, name = model.partition("/")
            based = self._based_on(name, project) or self._based_on(model)
            if based is None:
                raise
            policy = await self._untrained(based)
            self._keep(model, policy, num_changes)
            return policy
        registered, host = self._models.find(*key)
        asked_step = self._models.promoted_step(*key) if asked.step == "promoted" else asked.step
        step = registered.step if asked_step is None else asked_step
        checkpoint = self._models.checkpoint(registered, step)
        if step > registered.step or not checkpoint.exists():
            self._check_directory()
            what = f"step {step}, which is promoted" if asked.step == "promoted" else f"step {step}"
            raise NotFoundError(
                f"model {registered.key!r} has no published checkpoint of {what}; the newest is {registered.step}",
                param="model",
            )
        await asyncio.to_thread(self._models.published, registered, step)
        if host.one_policy:
            step = await self._only_step(registered, host, asked_step)
        adapter_id = registered.adapter_id(step)
        if not host.one_policy:
            await host.adapters.load(adapter_id, checkpoint)
        policy = await _make_policy(host, adapter_id, key, step, registered.settings.sampling)
        self._keep(model, policy, num_changes)
        return policy

    def _keep(self, asked: str, policy: PolicyRef, num_changes: int) -> None:
        """Cache a policy that was found after `num_changes`, unless e.g. a step was published meanwhile."""
        if num_changes == self._models.num_changes:
            if self._num_changes != num_changes:
                self._policies.clear()
                self._num_changes = num_changes
            self._policies[asked] = policy

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
        for _, model in sorted(self._models.by_key.items()):
            if project in (None, model.project) and model.base_model in spellings:
                return model
        return None

    async def _untrained(self, model: RegisteredModel) -> PolicyRef:
        """The untrained base model of a registered model. Its answers are recorded under its own name, so no model
        learns from them."""
        _, host = self._models.find(model.project, model.name)
        if host.one_policy:
            raise NotFoundError(
                f'{model.base_model} is not served: with `weights="merged"` vLLM holds one step of {model.key} at a '
                'time. Its untrained base model beside it needs `weights="lora"` or the embedded engine',
                param="model",
            )
        return await _make_policy(host, None, (model.project, model.base_model), 0)

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
        engine=host.engine,
        renderer=await host.renderer(),
        adapter=adapter,
        project=name[0],
        name=name[1],
        policy_version=step,
        max_context=info.max_context,
        longest_context=info.longest_context,
        sampling=sampling,
    )
