"""`ArtClient`: run and train an agent on an `art-server`, by the name of its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import art
from art.backend import BackendModel, Registration
from art.errors import ConfigError
from art.protocol.training import ModelStatus
from art.task import Task, get_task
from art.training_loop import StepReport, train_task
from openpipe_art.blocking import run_blocking

DEFAULT_MODEL = ("openpipe", "agent")
"""Project and name of a model that is registered without one being asked for."""


class AsyncArtClient:
    """Runs and trains one model of a server."""

    def __init__(
        self,
        server_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        base_model: str | None = None,
    ) -> None:
        """
        Args:
            server_url: of an `art-server`; by default the variable ART_SERVER_URL.
            api_key: by default the variable ART_API_KEY, or the key that a server on this machine made for itself.
            model: `project/name`; by default the only one that the server knows.
            base_model: to register the model with if the server does not know it; by default the only one that the
                server has loaded.
        """
        if model is not None and model.count("/") != 1:
            raise ConfigError(f"`model` is written project/name, got {model!r}")
        self._backend = _Attached(server_url, api_key)
        self._wanted = model
        self._base_model = base_model
        self._model: art.TrainableModel | None = None
        self._task: Task | None = None

    async def run_agent(
        self, task: str | Task, prompt: str | None = None, *, index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        """One rollout of a task, with its reward.

        Args:
            task: its name, `module:attribute`, or the task itself; `train` goes on with it.
            prompt: what the user says; without one, held-out scenario number `index` is played.
            step: of the checkpoint to act with; by default the newest.

        Raises:
            ConfigError: the task is unknown or takes no prompt, or it is not clear which model is meant.
        """
        self._task = get_task(task) if isinstance(task, str) else task
        scenario = (
            self._task.scenarios("val", seed=0, count=index + 1)[index]
            if prompt is None
            else self._task.prompt_scenario(prompt)
        )
        return await self._task.rollout(await self._ready(), scenario, step=step)

    async def train(
        self,
        iterations: int,
        *,
        task: str | Task | None = None,
        learning_rate: float | None = None,
        groups: int | None = None,
        rollouts: int | None = None,
        seed: int = 0,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> list[StepReport]:
        """So many training steps from where the model stands; each is served when the next begins.

        Args:
            task: by default that of the last `run_agent`.
            learning_rate: as `groups` (scenarios per step) and `rollouts` (per scenario) by default the task's own.

        Raises:
            ConfigError: no task was named yet.
            TrainingError: for several steps in a row there was nothing to learn.
        """
        if task is not None:
            self._task = get_task(task) if isinstance(task, str) else task
        if self._task is None:
            raise ConfigError("`train` does not know the task yet: pass `task=`, or call `run_agent` first")
        changes: dict[str, Any] = {
            "learning_rate": learning_rate,
            "groups_per_step": groups,
            "rollouts_per_group": rollouts,
        }
        defaults = replace(self._task.defaults, **{key: value for key, value in changes.items() if value is not None})
        model = await self._ready()
        return await train_task(
            model, self._task, defaults, num_steps=await model.get_step() + iterations, seed=seed,
            on_step=on_step or (lambda report: None),
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._backend.close()

    async def _ready(self) -> art.TrainableModel:
        if self._model is None:
            known = await self._backend.known_models()
            names = ", ".join(f"{status.project}/{status.name}" for status in known) or "none"
            wanted = None if self._wanted is None else tuple(self._wanted.split("/"))
            found = [status for status in known if wanted in (None, (status.project, status.name))]
            if len(found) > 1:
                raise ConfigError(f"the server has several models ({names}): say which with `model=`")
            if found:
                project, name, base_model = found[0].project, found[0].name, found[0].base_model
            else:
                project, name = wanted or DEFAULT_MODEL
                base_model = self._base_model or await self._backend.only_base_model()
            model = art.TrainableModel(project=project, name=name, base_model=base_model)
            await model.register(self._backend)
            self._model = model
        return self._model


class ArtClient:
    """`AsyncArtClient` for code without an event loop: the same arguments, the same results."""

    def __init__(self, server_url: str | None = None, api_key: str | None = None, **further: Any) -> None:
        self._client = AsyncArtClient(server_url, api_key, **further)

    def run_agent(self, task: str | Task, prompt: str | None = None, **further: Any) -> art.Trajectory:
        """One rollout of a task; see `AsyncArtClient.run_agent`."""
        return run_blocking(self._client.run_agent(task, prompt, **further))

    def train(self, iterations: int, **further: Any) -> list[StepReport]:
        """So many training steps; see `AsyncArtClient.train`."""
        return run_blocking(self._client.train(iterations, **further))


class _Attached(art.RemoteBackend):
    """A server whose models keep the settings that they have."""

    async def register(self, model: BackendModel) -> Registration | None:
        client = await self._connection()
        for status in await self.known_models():
            if (status.project, status.name) == (model.project, model.name):
                return Registration(server_url=client.base_url, api_key=client.api_key, status=status)
        return await super().register(model)

    async def known_models(self) -> list[ModelStatus]:
        client = await self._connection()
        names = [card.id.split("/") for card in await client.list_models()]
        return [await client.model_status(project, name) for project, name in names]

    async def only_base_model(self) -> str:
        client = await self._connection()
        loaded = [host["base_model"] for host in (await client.health()).get("base_models", [])]
        if len(loaded) != 1:
            raise ConfigError(
                f"the server does not know the model, and has {len(loaded)} base models to make it of "
                f"({', '.join(loaded) or 'none'}): pass `base_model=`"
            )
        return str(loaded[0])
