"""Wire types of jobs as such: their events and lists. What is asked for, and `JobStatus`, is in `training`."""

from __future__ import annotations

from typing import Literal

from art.protocol.job_states import JobState
from art.protocol.training import JobProgress, JobStatus, Wire


class JobEvent(Wire):
    """One server-sent event of `GET /api/jobs/{job_id}/events`."""

    number: int | None = None
    """Counts from 1 within a job, and is the event's id. Those of kind "queue" have none: what they tell is over as
    soon as it changes, and who comes back is told anew."""
    kind: Literal["state", "progress", "queue"]
    at: float
    """Unix time."""
    state: JobState | None = None
    """Of kind "state": what the job is from now on."""
    progress: JobProgress | None = None
    """Of kind "progress"."""
    queue_place: int | None = None
    """Of kind "queue": 1 is the next to run."""
    status: JobStatus | None = None
    """With the last event: all that there is to know."""


class JobList(Wire):
    jobs: list[JobStatus]
    """Newest first."""
