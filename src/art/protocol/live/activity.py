"""What a running server is doing for one model, as far as it is known at this moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art.protocol.job_states import JobKind
from art.protocol.training import JobProgress

ProcessState = Literal["up", "starting", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobActivity:
    """A job that has not ended."""

    kind: JobKind
    runs: bool
    """False while it waits in its queue."""
    age_s: float
    """Time since it began to run; while it waits, since it came or this server began."""
    progress: JobProgress | None = None
    queue_place: int | None = None
    """Place in its queue; 1 is the next to run."""
    runs_before: str | None = None
    """`project/name` of the model whose job runs now in the same queue, unless it belongs to another project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What happens for a model: its unfinished jobs, its requests, and the processes of its base model."""

    jobs: tuple[JobActivity, ...]
    """Oldest first."""
    num_requests: int
    """Requests of the model that have no answer yet."""
    num_sampling: int | None
    """How many of them have sampled a token; `None` where the engine does not report single tokens now."""
    answered_s: float | None
    """Time since the model's last answer; `None` if it has given none since the server began."""
    engine: ProcessState
    engine_sleeps: bool
    """Whether the engine has put its requests aside, because the trainer needs its device."""
    trainer: ProcessState
    trainer_does: str | None = None
    """What the trainer's process last said that it does; `None` before it has said anything."""
