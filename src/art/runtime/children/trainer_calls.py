"""The handlers of a trainer process: each call of the server becomes a call of `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from art.errors import InvalidRequestError
from art.protocol.calls import Call, InitCheckpoint, StartTrainer, Train, TrainSft, Trial
from art.protocol.samples import StepResult
from art.runtime.children.child import import_transformers

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team
    from art.trainer.trainer import OnProgress, Trainer


class TrainerCalls:
    """Makes the calls of one process on its one `Trainer`."""

    def __init__(self, team: Team | None = None) -> None:
        self.team = team
        """The processes that make the same calls; `None`: this process alone."""
        self._trainer: Trainer | None = None
        self._after: Callable[[], None] | None = None
        self.handlers: Mapping[type[Call[Any]], Callable[[Any, OnProgress | None], Any]] = {
            StartTrainer: self._start,
            InitCheckpoint: lambda call, _: self._started.init_checkpoint(call.path, call.lora),
            Train: self._train,
            TrainSft: self._train_sft,
            Trial: lambda call, _: self._started.trial(call.samples, call.lora),
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
        import_transformers()  # takes seconds: only once the connection exists and heartbeats flow
        from art.trainer.machine.distributed import ALONE
        from art.trainer.machine.memory import release_memory
        from art.trainer.trainer import Trainer

        self._trainer = Trainer(call.model, call.config, self.team or ALONE)
        if call.shares_gpu:
            self._after = release_memory  # torch keeps what it frees, and the engine needs it to wake up

    def _train(self, call: Train, on_progress: OnProgress | None) -> StepResult:
        return self._started.train(
            call.samples,
            call.config,
            from_checkpoint=call.from_checkpoint,
            to_checkpoint=call.to_checkpoint,
            job_id=call.job_id,
            pairs=call.pairs,
            references=call.references,
            on_progress=on_progress,
        )

    def _train_sft(self, call: TrainSft, on_progress: OnProgress | None) -> StepResult:
        return self._started.train_sft(
            call.samples,
            call.config,
            from_checkpoint=call.from_checkpoint,
            to_checkpoint=call.to_checkpoint,
            job_id=call.job_id,
            on_progress=on_progress,
        )

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise InvalidRequestError("the trainer has no model yet: call `start_trainer` first")
        return self._trainer
