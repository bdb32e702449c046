"""Wire types of job events and lists of jobs. Requests for jobs and `JobStatus` are in `training`."""

from __future__ import annotations

from typing import Literal

from art.protocol.job_states import JobState
from art.protocol.training import JobProgress, JobStatus, Wire


class JobEvent(Wire):
    """One server-sent event of `GET /api/jobs/{job_id}/events`."""

    number: int | None = None
    """Number within the job, from 1, and the id of the event. Events of kind "queue" have none: they describe only the
    present, so a client that reconnects gets a new one."""
    kind: Literal["state", "progress", "queue"]
    at: float
    """Unix time of the event."""
    state: JobState | None = None
    """The new state, for kind "state"."""
    progress: JobProgress | None = None
    """The progress, for kind "progress"."""
    queue_place: int | None = None
    """The place in the queue, for kind "queue"; 1 is the next to run."""
    status: JobStatus | None = None
    """The complete status, in the last event only."""


class JobList(Wire):
    jobs: list[JobStatus]
    """The jobs, newest first."""
