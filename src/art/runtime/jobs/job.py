"""A job as it is stored, and what each kind of job implements (`Work`), gets and returns.

The payload has everything that is needed to run a job, and to run it again after a crash. A training job names the
recorded exchanges that it learns from. It does not hold their tokens a second time, so the store reports those
exchanges as needed, and the recorder keeps them until the job has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

from art.config import TrainConfig, TrainSFTConfig
from art.credit.plan import StepPlan
from art.credit.sft import SftPath
from art.errors import ArtError, JobCancelledError
from art.gateway.json_pieces import json_pieces
from art.gateway.record.usage_book import UNKNOWN_KEY, Pending
from art.protocol.calls import Copy, Export, Pull, Push
from art.protocol.job_states import JobKind
from art.protocol.training import JobProgress

_DEPTH = 4
"""Levels from a request to the trajectories in its groups."""


def make_fingerprint(what: str, request: BaseModel) -> str:
    """Hash a request as it came, to tell one that is sent again from another one with the same job id.

    Args:
        what: kind of job, and the model that it is for.
    """
    digest = hashlib.sha256(what.encode() + b"\0")
    for piece in json_pieces(request, _DEPTH):
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


class Payload(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        """Make a copy in which `change` was applied to every path of the data directory."""
        return self

    def needed_checkpoints(self) -> Sequence[str]:
        """Paths of checkpoints that must not be deleted before the job has ended."""
        return ()

    def needed_exchanges(self) -> Sequence[str]:
        """Ids of exchanges that must not be deleted before the job has ended."""
        return ()


class TrainPayload(Payload):
    """A reinforcement-learning step. Its samples are built from the recorded exchanges when it runs."""

    config: TrainConfig
    plan: StepPlan
    sft: list[SftPath] = []
    """Supervised data of the step. Its texts were never recorded, so the job holds their tokens."""
    references: dict[int, Path] = {}
    """Paths of checkpoints that the loss compares with, by step."""
    repeated: str | None = None
    """Says that an earlier step learnt from the same answers; `None` if none did."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not (self.plan.samples or self.plan.observations or self.sft)

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        references = {step: change(path) for step, path in self.references.items()}
        return self.model_copy(update={"references": references})

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(path) for path in self.references.values()]

    def needed_exchanges(self) -> Sequence[str]:
        return self.plan.exchange_ids


class SftPayload(Payload):
    """A supervised step. Its texts were never recorded, so it holds their tokens itself."""

    config: TrainSFTConfig
    paths: list[SftPath]
    plan: StepPlan
    """Metrics and findings of the request. Its own `samples` are empty."""
    repeated: None = None


class FilePayload(Payload):
    """An export of a checkpoint, or its push to the Hugging Face hub or an S3 store."""

    call: Export | Push
    step: int
    result: dict[str, str]
    """Added to the job's `result` when it has succeeded."""

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        call = self.call
        if isinstance(call, Export):
            call = replace(call, source=change(call.source), target=change(call.target))
        else:
            call = replace(call, source=change(call.source))
        result = self.result | ({"path": str(change(Path(self.result["path"])))} if "path" in self.result else {})
        return self.model_copy(update={"call": call, "result": result})

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(self.call.source)]


class AdoptPayload(Payload):
    """A fork or a pull: a checkpoint from elsewhere becomes the newest of the model."""

    call: Copy | Pull
    step: int | None
    """Step of the checkpoint; `None` for the newest in an S3 store, which only the store knows."""
    origin: str
    """Names the place that the checkpoint comes from. Different places have different names."""

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        call = self.call
        if isinstance(call, Copy):
            call = replace(call, source=change(call.source), target=change(call.target))
        else:
            call = replace(call, checkpoints=change(call.checkpoints))
        return self.model_copy(update={"call": call})

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(self.call.source)] if isinstance(self.call, Copy) else []


PAYLOADS: dict[JobKind, type[Payload]] = {
    "train": TrainPayload,
    "train_sft": SftPayload,
    "fork": AdoptPayload,
    "pull": AdoptPayload,
    "export": FilePayload,
    "push": FilePayload,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A job without its payload, which may be large."""

    job_id: str
    kind: JobKind
    project: str
    name: str
    lane: str
    """Name of the queue in which the job waits. Jobs of one lane run one at a time."""

    @property
    def model_key(self) -> str:
        return f"{self.project}/{self.name}"

    def __str__(self) -> str:
        return f"{self.job_id} ({self.kind} of {self.model_key})"


@dataclass(frozen=True, slots=True)
class Job(Entry):
    payload: Payload
    from_step: int | None = None
    """The model's newest step when the job first began to run."""
    key_id: str = UNKNOWN_KEY
    """Id of the API key that asked for the job, which what it uses is counted for."""


class JobControl:
    """How a running job reports progress and learns that it was cancelled."""

    def __init__(self, report: Callable[[JobProgress], Any]) -> None:
        self.stop = asyncio.Event()
        """Set when the job has to end before it is done."""
        self.failure: ArtError | None = None
        """Why it has to end; `None` if it was cancelled."""
        self._report = report

    async def progress(self, phase: str, done: int, total: int) -> None:
        await self._report(JobProgress(phase=phase, done=done, total=total))

    def check(self) -> None:
        """Stop the job here if it was cancelled.

        Raises:
            JobCancelledError: the job was cancelled.
        """
        if self.stop.is_set():
            raise JobCancelledError("the job was cancelled")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job that succeeded."""

    changes: Mapping[str, Any]
    """New values of fields of the job's status."""
    published_step: int | None = None
    """The model's new step; `None` if the step did not change."""
    identity: str | None = None
    """Identity of the published checkpoint, by which one that is put in its place is noticed."""
    learnt_from: Sequence[str] = ()
    """Ids of the exchanges that the step learnt from."""
    used: Pending = field(default_factory=dict)
    """Usage that is stored in the transaction that records the result."""


class Work(Protocol):
    """Interface of a class that runs jobs. A job runs twice if the server dies before it records the result."""

    def lane(self, job: Entry) -> str:
        """Name the lane of a job, the queue in which it waits. Jobs of one lane run one at a time."""
        ...

    def from_step(self, job: Job) -> int | None:
        """Return the model's newest step, which is stored when the job first runs; `None` if the job needs none."""
        ...

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        """Do the job and return its result. `from_step` is the step that `from_step()` returned.

        Raises:
            JobCancelledError: the job was stopped and left nothing on disk.
            ArtError: the job failed.
        """
        ...
