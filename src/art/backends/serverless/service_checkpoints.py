"""Checkpoints at the service: it lists and deletes them. What it has no call for is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from art.backends.serverless.service import Service
from art.backends.serverless.steps import ServiceTraining
from art.backends.serverless.wire import Checkpoint
from art.client.checkpoint_client import Checkpoints, Infos, NamedModel, Steps
from art.client.client import ArtClient
from art.errors import ConfigError
from art.protocol.checkpoint_calls import BEST_METRIC, CheckpointInfo


class Refused:
    """A method that the service has no call for. Calling it raises a `ConfigError`, before anything is sent."""

    def __init__(self, why: str) -> None:
        """
        Args:
            why: what the service lacks and what to do instead, in words that end the message.
        """
        self.why = why
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._refuse

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"ServerlessBackend has no `{self._name}`: {self.why}")


class ServerlessCheckpoints(Checkpoints):
    """Lists and deletes the checkpoints of models at the service."""

    promote: Any = Refused("the service has no promoted name; ask a step by `model.get_inference_name(step)`")
    promotions: Any = Refused("the service has no promoted name; ask a step by `model.get_inference_name(step)`")
    download: Any = Refused("the service gives no files; a checkpoint is an artifact in W&B, see docs/serverless.md")
    fork: Any = Refused("every model starts from its base model")
    export: Any = Refused("the service gives no files; a checkpoint is an artifact in W&B, see docs/serverless.md")
    push: Any = Refused("the service sends no checkpoints elsewhere; each is an artifact in W&B")
    pull: Any = Refused("every model starts from its base model")

    def __init__(
        self,
        service: Service,
        training_of: Callable[[NamedModel], ServiceTraining],
        connect: Callable[[], Awaitable[ArtClient]],
    ) -> None:
        """
        Args:
            training_of: finds the registered model.
            connect: raises, because there is no ART server.
        """
        super().__init__(connect, lambda model, step: step)
        self._service, self._training_of = service, training_of

    async def list(self, model: NamedModel, *, best_metric: str = BEST_METRIC) -> Infos:
        """List checkpoints by step, with the service's metrics, and which is the newest and the best.

        The service does not tell when a checkpoint was made and how large it is: both are 0.
        """
        checkpoints = await self._service.checkpoints(self._training_of(model).model.id)
        best = _best_step(checkpoints, best_metric)
        return [
            CheckpointInfo(
                step=one.step, created_at=0.0, size_bytes=0, full=False, metrics=one.metrics,
                newest=one is checkpoints[-1], best=one.step == best,
            )
            for one in checkpoints
        ]  # fmt: skip

    async def delete(
        self, model: NamedModel, *, keep_steps: Iterable[int] = (), keep_recent: int = 1, best_metric: str = BEST_METRIC
    ) -> Steps:
        """Delete all checkpoints but `keep_steps`, the `keep_recent` newest, and the best by the service's metrics.

        Returns:
            The steps that were deleted.
        """
        if keep_recent < 1:
            raise ConfigError(f"`keep_recent` must be at least 1, got {keep_recent}", param="keep_recent")
        model_id = self._training_of(model).model.id
        checkpoints = await self._service.checkpoints(model_id)
        keep = {*keep_steps, *(one.step for one in checkpoints[-keep_recent:]), _best_step(checkpoints, best_metric)}
        steps = [one.step for one in checkpoints if one.step not in keep]
        if steps:
            await self._service.delete_checkpoints(model_id, steps)
        return steps


def _best_step(checkpoints: Iterable[Checkpoint], metric: str) -> int | None:
    """The step with the highest value of a metric, of equal ones the newest; `None` if no checkpoint has it."""
    known = [one for one in checkpoints if metric in one.metrics]
    return max(known, key=lambda one: (one.metrics[metric], one.step)).step if known else None
