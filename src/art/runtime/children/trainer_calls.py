"""What the server asks of a trainer, as calls of `Trainer`: frames' parameters in, results out.

    start            {model, config, shares_gpu}                                  -> {}
    init_checkpoint  {path, lora}: lora or null                                   -> {step, metrics}
    train            {samples, config, from_checkpoint, to_checkpoint, job_id,    -> {step, metrics}
                      pairs, references}
    train_sft        the same without pairs and references                        -> {step, metrics}
    trial            {samples, lora}                                              -> what the update took

Settings that are not valid are a `ConfigError`, and samples an `InvalidRequestError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from art.config import LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ConfigError, InvalidRequestError
from art.trainer.contract import samples_from_wire

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team
    from art.trainer.trainer import OnProgress, Trainer

Params = dict[str, Any]
_ConfigType = TypeVar("_ConfigType", TrainerConfig, LoraConfig, TrainConfig, TrainSFTConfig)


class TrainerCalls:
    """Makes the calls of one process, on its one `Trainer`."""

    def __init__(self, team: Team | None = None) -> None:
        self.team = team
        """The processes that make the same calls; `None`: this one alone."""
        self._trainer: Trainer | None = None
        self._after: Callable[[], None] | None = None
        self._methods: dict[str, Callable[[Params, OnProgress | None], Params]] = {
            "start": self._start,
            "init_checkpoint": self._init_checkpoint,
            "train": self._train,
            "train_sft": self._train_sft,
            "trial": self._trial,
        }

    def make(self, method: str, params: Params, on_progress: OnProgress | None = None) -> Params:
        """
        Raises:
            InvalidRequestError: there is no such method, or no trainer yet.
            ArtError: what the trainer raises.
        """
        if method not in self._methods:
            raise InvalidRequestError(f"the trainer has no method {method!r}; it has {', '.join(self._methods)}")
        try:
            return self._methods[method](params, on_progress)
        finally:
            if self._after is not None:
                self._after()

    def _start(self, params: Params, on_progress: OnProgress | None) -> Params:
        from art.trainer.machine.distributed import (
            ALONE,  # torch: only once the connection stands and its heartbeat runs
        )
        from art.trainer.machine.memory import release_memory
        from art.trainer.trainer import Trainer

        self._trainer = Trainer(params["model"], validated(TrainerConfig, params["config"]), self.team or ALONE)
        if params.get("shares_gpu", False):
            self._after = release_memory  # torch keeps what it frees, and an engine that slept is to wake up
        return {}

    def _init_checkpoint(self, params: Params, on_progress: OnProgress | None) -> Params:
        lora = None if params["lora"] is None else validated(LoraConfig, params["lora"])
        return asdict(self._started().init_checkpoint(Path(params["path"]), lora))

    def _train(self, params: Params, on_progress: OnProgress | None) -> Params:
        result = self._started().train(
            config=validated(TrainConfig, params["config"]),
            pairs=[(chosen, rejected) for chosen, rejected in params.get("pairs", ())],
            references={int(step): Path(path) for step, path in params.get("references", {}).items()},
            on_progress=on_progress,
            **_job(params),
        )
        return asdict(result)

    def _train_sft(self, params: Params, on_progress: OnProgress | None) -> Params:
        config = validated(TrainSFTConfig, params["config"])
        return asdict(self._started().train_sft(config=config, on_progress=on_progress, **_job(params)))

    def _trial(self, params: Params, on_progress: OnProgress | None) -> Params:
        lora = None if params["lora"] is None else validated(LoraConfig, params["lora"])
        return self._started().trial(samples_from_wire(params["samples"]), lora)

    def _started(self) -> Trainer:
        if self._trainer is None:
            raise InvalidRequestError("the trainer has no model yet: call `start` first")
        return self._trainer


def _job(params: Params) -> dict[str, Any]:
    """The arguments that both training methods share."""
    return {
        "samples": samples_from_wire(params["samples"]),
        "from_checkpoint": Path(params["from_checkpoint"]),
        "to_checkpoint": Path(params["to_checkpoint"]),
        "job_id": params["job_id"],
    }


def validated(kind: type[_ConfigType], value: Params) -> _ConfigType:
    """
    Raises:
        ConfigError: `value` is not a valid `kind`.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{kind.__name__} is not valid: {error}") from error
