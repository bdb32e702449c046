"""One typed method per endpoint.

A server may be restarted at any time. A job is submitted under an id that the server runs at most once, so a repeated
call continues the same job.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from art.client.files import OnBytes, download
from art.client.http import HttpClient
from art.client.jobs import finish_job, job_status, stream_events
from art.protocol.answers import ModelCard, ModelList
from art.protocol.checkpoint_calls import (
    BEST_METRIC,
    CheckpointList,
    ExportFormat,
    ExportRequest,
    FileList,
    ForkRequest,
    MetricsRow,
    PullRequest,
    PushRequest,
    Recorded,
)
from art.protocol.jobs import JobEvent, JobList
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 900.0
"""Time limit of a registration, the first of which downloads the base model and starts its engine."""


class ArtClient(HttpClient):
    """A client of one server. Use it from any event loop, and close it in each."""

    # --- endpoints ---

    async def health(self) -> dict[str, Any]:
        return await self.json("GET", "/health")

    async def register(self, request: RegisterRequest) -> ModelStatus:
        what = f"the server to register {request.project}/{request.name} ({request.base_model})"
        return await self.typed(
            ModelStatus, "POST", "/api/models", body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """Check on the server what training the model needs. With a trial it takes as long as a training step."""
        path, what = _model_path(project, name, "preflight"), f"the checks of {project}/{name}"
        return await self.typed(
            PreflightReport, "POST", path, body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def list_models(self) -> list[ModelCard]:
        """List the models that can be sampled from; the id of each is `project/name`."""
        return (await self.typed(ModelList, "GET", "/v1/models")).data

    async def model_status(self, project: str, name: str) -> ModelStatus:
        return await self.typed(ModelStatus, "GET", _model_path(project, name))

    async def list_checkpoints(self, project: str, name: str) -> list[int]:
        """List the steps of a model's checkpoints, in order."""
        return (await self.checkpoints(project, name)).steps

    async def checkpoints(self, project: str, name: str, *, best_metric: str = BEST_METRIC) -> CheckpointList:
        params = {"metric": best_metric}
        return await self.typed(CheckpointList, "GET", _model_path(project, name, "checkpoints"), params=params)

    async def download_checkpoint(
        self,
        project: str,
        name: str,
        step: int,
        target: Path,
        *,
        format: ExportFormat | None = None,
        on_bytes: OnBytes | None = None,
    ) -> FileList:
        """Download a checkpoint, or an export of it, as the folder `target`; see `download`."""
        place = _model_path(project, name, f"checkpoints/{step}" + (f"/exports/{format}" if format else ""))
        return await download(self, place, target, on_bytes)

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        await self.typed(Recorded, "POST", _model_path(project, name, "metrics"), body=row)

    async def delete_checkpoints(
        self, project: str, name: str, request: DeleteCheckpointsRequest
    ) -> DeleteCheckpointsResponse:
        path = _model_path(project, name, "checkpoints/delete")
        return await self.typed(DeleteCheckpointsResponse, "POST", path, body=request)

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> RolloutRecord:
        """A rollout and its recorded conversations; `project` is needed if several projects use the same id."""
        params = None if project is None else {"project": project}
        return await self.typed(RolloutRecord, "GET", _rollout_path(rollout_id), params=params)

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        return await self.typed(RolloutStatus, "PUT", _rollout_path(rollout_id), body=update)

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        fields = query.model_dump(mode="json", exclude_none=True)
        params = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
        return await self.typed(RolloutPage, "GET", "/api/rollouts", params=params)

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus:
        return await self.typed(JobStatus, "POST", _model_path(project, name, "train"), body=request)

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus:
        return await self.typed(JobStatus, "POST", _model_path(project, name, "train_sft"), body=request)

    async def job_status(self, job_id: str, *, wait_s: float = 0.0) -> JobStatus:
        """The state of a job. With `wait_s`, waits until it changes, but not longer than that many seconds."""
        return await job_status(self, job_id, wait_s=wait_s)

    async def list_jobs(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List jobs, newest first: those of a project or model, or all that the key may see."""
        params = {"limit": str(limit), "unfinished": "1" if unfinished else "0"}
        params |= {key: value for key, value in (("project", project), ("name", name)) if value is not None}
        return (await self.typed(JobList, "GET", "/api/jobs", params=params)).jobs

    async def cancel_job(self, job_id: str) -> JobStatus:
        """Stop a job; a job that has ended stays as it is. A training stops after its current micro-batch."""
        return await self.typed(JobStatus, "POST", f"/api/jobs/{quote(job_id, safe='')}/cancel")

    def job_events(self, job_id: str, *, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Events of a job after number `after`, until it has ended or the connection breaks; see `stream_events`."""
        return stream_events(self, job_id, after)

    # --- jobs ---

    async def train(self, project: str, name: str, request: TrainRequest, *, show: bool = False) -> JobStatus:
        """Submit a training step and wait for its end, with a progress bar if `show`.

        Raises:
            ArtError: the error that the job ended with; a `JobCancelledError` if somebody stopped it.
            ProcessError: it took longer than `JOB_DEADLINE_S`.
        """
        what = f"training of {project}/{name}"
        return await self.finish(lambda: self.submit_train(project, name, request), what, show=show)

    async def train_sft(self, project: str, name: str, request: TrainSFTRequest, *, show: bool = False) -> JobStatus:
        """Submit a supervised fine-tuning and wait for its end; the errors are those of `train`."""
        what = f"supervised fine-tuning of {project}/{name}"
        return await self.finish(lambda: self.submit_train_sft(project, name, request), what, show=show)

    async def fork(self, project: str, name: str, request: ForkRequest, *, show: bool = False) -> JobStatus:
        """Submit a fork and wait for its end; the errors are those of `train`."""
        return await self._file_job("fork", project, name, request, show)

    async def export(self, project: str, name: str, request: ExportRequest, *, show: bool = False) -> JobStatus:
        return await self._file_job("export", project, name, request, show)

    async def push(self, project: str, name: str, request: PushRequest, *, show: bool = False) -> JobStatus:
        return await self._file_job("push", project, name, request, show)

    async def pull(self, project: str, name: str, request: PullRequest, *, show: bool = False) -> JobStatus:
        return await self._file_job("pull", project, name, request, show)

    async def _file_job(self, kind: str, project: str, name: str, request: BaseModel, show: bool) -> JobStatus:
        path, what = _model_path(project, name, kind), f"the {kind} of {project}/{name}"
        return await self.finish(lambda: self.typed(JobStatus, "POST", path, body=request), what, show=show)

    async def finish(self, submit: Callable[[], Awaitable[JobStatus]], what: str, *, show: bool = False) -> JobStatus:
        """Submit a job, again if the server has lost it, and wait for its end; the errors are those of `train`."""
        return await finish_job(self, submit, what, show=show)


def _model_path(project: str, name: str, rest: str = "") -> str:
    path = f"/api/models/{quote(project, safe='')}/{quote(name, safe='')}"
    return f"{path}/{rest}" if rest else path


def _rollout_path(rollout_id: str) -> str:
    return f"/api/rollouts/{quote(rollout_id, safe='')}"
