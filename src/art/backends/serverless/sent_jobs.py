"""The jobs of one model that were sent to the service, on disk, so that a script that was killed finds them again."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import StorageError
from art.protocol.job_states import JobKind
from art.protocol.training import JobStatus
from art.storage.atomic import storage_errors, write_file

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
    """The file of one model. Each change is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, job_id: str, model_id: str) -> SentJob | None:
        """Return a job of a model. Jobs of an earlier model of the same name, which was deleted, do not count."""
        return next((job for job in self._read() if (job.job_id, job.model_id) == (job_id, model_id)), None)

    def unfinished(self, model_id: str) -> list[SentJob]:
        """Return the jobs of a model whose end is not known, in the order in which they were sent."""
        return [job for job in self._read() if job.status is None and job.model_id == model_id]

    def put(self, job: SentJob) -> SentJob:
        """Write a job, in place of what was known about it. Returns the job."""
        jobs = self._read()
        known = next((i for i, other in enumerate(jobs) if other.job_id == job.job_id), None)
        if known is None:
            jobs.append(job)
        else:
            jobs[known] = job
        num_old = max(0, len(jobs) - KEPT)
        self._write([other for i, other in enumerate(jobs) if i >= num_old or other.status is None])
        return job

    def remove(self, job_id: str) -> None:
        """Forget a job that the service has refused."""
        self._write([job for job in self._read() if job.job_id != job_id])

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
