"""The jobs of one model that were sent to the service, on disk, so that a script that was killed finds them again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import StorageError
from art.protocol.job_states import JobKind
from art.protocol.training import JobStatus
from art.storage.atomic import storage_errors, write_file
from art.storage.lock import locked

LOCK_WAIT_S = 30.0
"""Seconds that a change of the file waits for that of another process, which takes milliseconds."""
KEPT = 100
"""Newest jobs that are kept. Older ones that have ended are forgotten."""


class SentJob(BaseModel):
    """A job that was sent, or was about to be sent when the script was killed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    job_id: str
    """ART's name of the job."""
    kind: JobKind
    digest: str
    """Hash of groups and settings, by which another request under the same name is noticed."""
    model_id: str
    """Model at the service."""
    from_step: int
    """Newest checkpoint when the job was sent. The job's own has a larger step."""
    sent_at: float
    """Unix time at which it was sent."""
    service_job_id: str | None = None
    """The service's name of the job; `None` until it has answered."""
    findings: list[str] = []
    """Remarks about what was sent."""
    metrics: dict[str, float] = {}
    """Numbers about what was sent."""
    status: JobStatus | None = None
    """How the job ended; `None` until that is known."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    jobs: list[SentJob] = []


class SentJobs:
    """The file of one model. Each change is on disk before the call returns. Several processes may use the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path.with_name(f".{path.name}.lock")

    def find(self, job_id: str, model_id: str) -> SentJob | None:
        """Return a job of a model. Jobs of an earlier model of the same name, which was deleted, do not count."""
        return next((job for job in self._read() if (job.job_id, job.model_id) == (job_id, model_id)), None)

    def unfinished(self, model_id: str) -> list[SentJob]:
        """Return the jobs of a model whose end is not known, in the order in which they were sent."""
        return [job for job in self._read() if job.status is None and job.model_id == model_id]

    def begin(self, job: SentJob) -> bool:
        """Write a job that is about to be sent, unless another one of its model has not ended. Returns whether it was
        written."""
        with self._changing():
            if any(other.job_id != job.job_id for other in self.unfinished(job.model_id)):
                return False
            self._put(job)
            return True

    def put(self, job: SentJob) -> SentJob:
        """Write a job, in place of what was known about it. Returns the job.

        If its end is known already, because another process has followed it too, that stays and is returned.
        """
        with self._changing():
            known = self.find(job.job_id, job.model_id)
            if known is not None and known.status is not None:
                return known
            self._put(job)
        return job

    def remove(self, job_id: str) -> None:
        """Forget a job that the service has refused."""
        with self._changing():
            self._write([job for job in self._read() if job.job_id != job_id])

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from changing the file between reading and writing it."""
        return locked(self._lock, what=f"changing {self.path}", wait_s=LOCK_WAIT_S)

    def _put(self, job: SentJob) -> None:
        jobs = self._read()
        known = next((i for i, other in enumerate(jobs) if other.job_id == job.job_id), None)
        if known is None:
            jobs.append(job)
        else:
            jobs[known] = job
        num_old = max(0, len(jobs) - KEPT)
        self._write([other for i, other in enumerate(jobs) if i >= num_old or other.status is None])

    def _read(self) -> list[SentJob]:
        """Return the jobs.

        Raises:
            StorageError: the file is damaged. It is not replaced, because a job may be running that it names.
        """
        try:
            with storage_errors(self.path, "reading"):
                content = self.path.read_bytes() if self.path.exists() else b"{}"
            return _File.model_validate_json(content).jobs
        except ValidationError as error:
            raise StorageError(
                f"{self.path} cannot be read: {error}. It names the jobs that were sent to the service; see there "
                "whether one is running, then remove the file"
            ) from error

    def _write(self, jobs: list[SentJob]) -> None:
        with storage_errors(self.path, "writing"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, _File(jobs=jobs).model_dump_json(indent=1).encode())
