"""The handlers of a trainer process: each call of the server becomes a call of `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from art.errors import InvalidRequestError
from art.protocol.calls import Call, InitCheckpoint, StartTrainer, Train, TrainSft, Trial, WriteLoudAdapters
from art.runtime.children.child import import_transformers

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team
    from art.trainer.trainer import OnProgress, Trainer


class TrainerCalls:
    """Runs the calls that a trainer process receives, on its one `Trainer`."""

    def __init__(self, team: Team | None = None) -> None:
        self.team = team
        """The processes that train together and make the same calls; `None` if this process trains alone."""
        self._trainer: Trainer | None = None
        self._after: Callable[[], None] | None = None
        self.handlers: Mapping[type[Call[Any]], Callable[[Any, OnProgress | None], Any]] = {
            StartTrainer: self._start,
            InitCheckpoint: lambda call, _: self._started.init_checkpoint(call.path, call.lora),
            Train: lambda call, on_progress: self._started.train(call, on_progress),
            TrainSft: lambda call, on_progress: self._started.train(call, on_progress),
            Trial: lambda call, _: self._started.trial(call.samples, call.lora),
            WriteLoudAdapters: lambda call, _: self._started.write_loud_adapters(call.folder, call.lora),
        }

    def make(self, call: Call[Any], on_progress: OnProgress | None = None) -> Any:
        """Make the call and return its result.

        Raises:
            InvalidRequestError: there is no trainer yet.
            ArtError: what the trainer raises.
        """
        try:
            return self.handlers[type(call)](call, on_progress)
        finally:
            if self._after is not None:
                self._after()

    def _start(self, call: StartTrainer, on_progress: OnProgress | None) -> None:
        _import_trainer()
        from art.trainer.machine.distributed import ALONE
        from art.trainer.machine.memory import release_memory
        from art.trainer.trainer import Trainer

        self._trainer = Trainer(call.model, call.config, self.team or ALONE)
        if call.shares_gpu:
            self._after = release_memory  # torch keeps what it frees, and the engine needs it to wake up

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise InvalidRequestError("the trainer has no model yet: call `start_trainer` first")
        return self._trainer


def _import_trainer() -> None:
    """Import the trainer. That takes seconds: only once the connection exists and heartbeats flow."""
    import_transformers()
    import art.trainer.trainer  # noqa: F401
