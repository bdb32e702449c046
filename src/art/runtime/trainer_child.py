"""The trainer process: frames in, `Trainer` calls, frames out.

    start            {model, config}                                              -> {}
    init_checkpoint  {path, lora}                                                 -> {step, metrics}
    train            {samples, config, from_checkpoint, to_checkpoint, job_id,    -> {progress: {done, total}} ...,
                      pairs, references}                                             then {step, metrics}
    train_sft        the same without pairs and references

One call at a time, in order. A failed call leaves the process alive. A cancelled call that waits is dropped; one that
runs goes on, because its job is durable and somebody may ask for its result again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from art.config import LoraConfig, TrainConfig, TrainerConfig, TrainSFTConfig
from art.errors import ArtError, ConfigError, InvalidRequestError
from art.runtime.child import Child, child_from_argv
from art.trainer.types import samples_from_wire

if TYPE_CHECKING:
    from art.trainer.trainer import Trainer

_log = logging.getLogger(__name__)

Params = dict[str, Any]
_ConfigType = TypeVar("_ConfigType", TrainerConfig, LoraConfig, TrainConfig, TrainSFTConfig)


class TrainerServer:
    """Answers the frames of one `Child`."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._trainer: Trainer | None = None
        self._methods: dict[str, Callable[[int, Params], Any]] = {
            "start": self._start,
            "init_checkpoint": self._init_checkpoint,
            "train": self._train,
            "train_sft": self._train_sft,
        }

    def run(self) -> None:
        """Serve until the process is killed, or exits because the parent is gone."""
        while True:
            self._child.tick("idle")
            frame = self._child.inbox.get()
            if "cancel" not in frame and not self._is_cancelled(frame["id"]):
                self._answer(frame)

    def _answer(self, frame: dict[str, Any]) -> None:
        call_id, method = frame["id"], frame["method"]
        self._child.tick(method)
        try:
            if method not in self._methods:
                raise InvalidRequestError(f"the trainer has no method {method!r}; it has {', '.join(self._methods)}")
            result = self._methods[method](call_id, frame["params"])
        except Exception as error:  # the boundary of the process: the caller gets it, and the next call may succeed
            if not isinstance(error, ArtError):
                _log.exception("%s failed", method)
            self._child.socket.fail(call_id, error)
        else:
            self._child.socket.reply(call_id, result)

    def _is_cancelled(self, call_id: int) -> bool:
        """Whether the caller of a waiting call has gone meanwhile."""
        with self._child.inbox.mutex:
            return any(frame.get("cancel") == call_id for frame in self._child.inbox.queue)

    # -- methods --

    def _start(self, call_id: int, params: Params) -> Params:
        from art.trainer.trainer import Trainer  # torch: only once the connection stands and its heartbeat runs

        self._trainer = Trainer(params["model"], _validated(TrainerConfig, params["config"]))
        return {}

    def _init_checkpoint(self, call_id: int, params: Params) -> Params:
        lora = _validated(LoraConfig, params["lora"])
        return asdict(self._started().init_checkpoint(Path(params["path"]), lora))

    def _train(self, call_id: int, params: Params) -> Params:
        config = _validated(TrainConfig, params["config"])
        return asdict(
            self._started().train(
                config=config,
                pairs=[(chosen, rejected) for chosen, rejected in params.get("pairs", ())],
                references={int(step): Path(path) for step, path in params.get("references", {}).items()},
                **self._job(call_id, "train", params),
            )
        )

    def _train_sft(self, call_id: int, params: Params) -> Params:
        config = _validated(TrainSFTConfig, params["config"])
        return asdict(self._started().train_sft(config=config, **self._job(call_id, "train_sft", params)))

    def _job(self, call_id: int, method: str, params: Params) -> dict[str, Any]:
        """The arguments that both training methods share."""

        def on_progress(done: int, total: int) -> None:
            self._child.tick(f"{method}: micro-batch {done} of {total}")
            self._child.socket.reply(call_id, {"progress": {"done": done, "total": total}}, last=False)

        return {
            "samples": samples_from_wire(params["samples"]),
            "from_checkpoint": Path(params["from_checkpoint"]),
            "to_checkpoint": Path(params["to_checkpoint"]),
            "job_id": params["job_id"],
            "on_progress": on_progress,
        }

    def _started(self) -> Trainer:
        if self._trainer is None:
            raise InvalidRequestError("the trainer has no model yet: call `start` first")
        return self._trainer


def _validated(kind: type[_ConfigType], value: dict[str, Any]) -> _ConfigType:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{kind.__name__} is not valid: {error}") from error


def main() -> None:
    TrainerServer(child_from_argv("art-trainer")).run()


if __name__ == "__main__":
    main()
