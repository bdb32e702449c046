"""Training as the client sees it: what is read of a model, its steps, and the job of a step under way."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from art.client.checkpoint_client import NamedModel
from art.client.terminal import forget_steps, note_step
from art.config import ModelSettings, OptimizerConfig, TrainConfig, TrainSFTConfig
from art.config.training import OnNothing
from art.errors import ConfigError, NothingTrainableError, TrainingError
from art.protocol.training import JobId, JobStatus, ModelStatus

logger = logging.getLogger(__name__)

_C = TypeVar("_C", TrainConfig, TrainSFTConfig)
REMIND_AFTER_STEPS = 20
"""A finding (a remark on a step) that comes up again is logged again only after this many steps."""
_followed: set[asyncio.Task[TrainResult]] = set()
"""Tasks that follow jobs. An event loop alone would not keep them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRegistration:
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
    try:
        return uuid.uuid4().hex if job_id is None else TypeAdapter(JobId).validate_python(job_id)
    except ValidationError as error:
        raise ConfigError(
            "`job_id` must be 8 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit; got "
            f"{job_id!r}",
            param="job_id",
        ) from error


class ModelSteps:
    """Remembers at which step one backend last saw each model (`project/name`) that it registered or trained."""

    def __init__(self) -> None:
        self._steps: dict[str, int | None] = {}
        """`None` until the server has told the step."""
        self._logged: dict[tuple[str, str], int] = {}
        """Step at which a finding was last logged, by model and meaning of the finding."""

    def expect(self, model: str) -> None:
        """Name `model` in the line that is printed after Ctrl-C, even before its step is known."""
        note_step(model, self._steps.setdefault(model, None))

    def note(self, model: str, step: int) -> int:
        """Remember that `model` is at `step`. Returns `step`."""
        self._steps[model] = step
        note_step(model, step)
        return step

    def forget(self) -> None:
        """Leave the models out of the line that is printed after Ctrl-C."""
        forget_steps(self._steps)

    def conclude(self, model: str, status: JobStatus, on_nothing: OnNothing) -> TrainResult:
        """Make the result of a training job of `model` that succeeded, and log its findings.

        Raises:
            NothingTrainableError: there was nothing to learn, and `on_nothing` is "raise".
            TrainingError: the job has no step; it is not one that trains.
        """
        if status.step is None:
            raise TrainingError(f"job {status.job_id} ended without a checkpoint; see the server's log")
        trained = status.trained is not False
        findings = list(status.findings)
        self._log_findings(model, self.note(model, status.step), findings)
        if not trained and on_nothing == "raise":
            raise NothingTrainableError(findings[0])
        return TrainResult(
            step=status.step, trained=trained, metrics=status.metrics, findings=findings,
            checkpoint_path=status.checkpoint_path,
        )  # fmt: skip

    def skip(self, model: str, step: int, why: str) -> TrainResult:
        """Make the result of a step of `model` that had no trajectory to train on, and log why."""
        self._log_findings(model, self.note(model, step), [why])
        return TrainResult(step=step, trained=False, findings=[why])

    def _log_findings(self, model: str, step: int, findings: Sequence[str]) -> None:
        """Log findings that were not logged recently. A finding reads "what was seen: what it means"."""
        for finding in findings:
            seen, _, meaning = finding.partition(": ")
            if "[" in seen:
                continue  # names single groups: some are left out in most steps, and the result lists them
            if step - self._logged.get((model, meaning), -math.inf) >= REMIND_AFTER_STEPS:
                self._logged[model, meaning] = step
                logger.warning("%s step %d: %s", model, step, finding)


class JobCalls(Protocol):
    """Interface of what knows the state of jobs."""

    async def job_status(self, job_id: str) -> JobStatus: ...

    async def cancel_job(self, job_id: str) -> JobStatus: ...


class TrainJob:
    """A training step that goes on while your program does something else. Await it for its `TrainResult`.

    It may be awaited several times, and from several tasks of the event loop in which it was made. A failure that
    nobody awaits is logged. If the program ends first, the job goes on at its server, or once that is started again;
    `backend.follow_train_job` returns it by its id.

        job = await backend.train(model, groups, wait=False)
        ...                     # the next rollouts
        result = await job
    """

    def __init__(
        self, client: JobCalls, job_id: str, result: Coroutine[Any, Any, TrainResult] | asyncio.Task[TrainResult]
    ) -> None:
        """
        Args:
            result: follows the job to its end. It is run as a task at once.
        """
        self.job_id = job_id
        self._client = client
        self._num_waiting = 0
        self._task = asyncio.ensure_future(result)
        _followed.add(self._task)
        self._task.add_done_callback(self._ended)

    def __await__(self) -> Generator[Any, Any, TrainResult]:
        self._num_waiting += 1
        try:
            return (yield from asyncio.shield(self._task).__await__())  # who stops waiting does not stop the job
        finally:
            self._num_waiting -= 1

    def done(self) -> bool:
        """Whether the job has ended, well or badly, and this program knows it."""
        return self._task.done()

    async def status(self) -> JobStatus:
        """Ask the server for the state of the job, with its place in the queue and its progress."""
        return await self._client.job_status(self.job_id)

    async def cancel(self) -> None:
        """Stop the job; it ends after its current micro-batch. Awaiting it then raises `JobCancelledError`."""
        await self._client.cancel_job(self.job_id)

    def _ended(self, task: asyncio.Task[TrainResult]) -> None:
        _followed.discard(task)
        if task.cancelled():
            logger.info("training job %s is not followed any more; it goes on at the server", self.job_id)
        elif (error := task.exception()) is not None and not self._num_waiting:
            logger.error(
                "training job %s failed while nothing awaited it: %s: %s", self.job_id, type(error).__name__, error
            )

    def __repr__(self) -> str:
        return f"<TrainJob {self.job_id}{' done' if self.done() else ''}>"
