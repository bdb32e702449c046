"""`ServerClient`: one typed method per endpoint of an ART server; submits jobs, and follows each to its end.

A server may be restarted at any time. A job is submitted under an id that the server runs at most once, so a repeated
call continues the same job.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel

from art.client.http import READ_TIMEOUT_S, HttpClient, LostAnswerError
from art.client.terminal import JobView, announce_wait, describe_job, note_detail
from art.errors import (
    ArtError,
    ConfigError,
    CorruptCheckpointError,
    InvalidRequestError,
    JobCancelledError,
    NotFoundError,
    ProcessError,
    TrajectoryMismatchError,
    error_from_code,
)
from art.protocol.checkpoint_calls import FileInfo, FileList
from art.protocol.keys import LOGIN_MARK, Empty, PageLink
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import ENDED, JobKind, JobList, JobStatus, ModelStatus, RegisterRequest

if TYPE_CHECKING:
    from art.protocol.answers import ModelCard
    from art.protocol.usage_report import Quota, UsageReport


logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 900.0
"""Time limit of a registration, the first of which downloads the base model and starts its engine."""


JOB_DEADLINE_S = 24 * 3600.0
POLL_S, SHOWN_POLL_S = 20.0, 1.0
"""How long the server may wait for the end of the job before it answers, and with a progress bar."""
Submit = Callable[[], Awaitable[JobStatus]]
"""Submits a job, again if the server has lost it."""


class ServerClient(HttpClient):
    """A client of one server. Use it from any event loop, and close it in each."""

    async def health(self) -> dict[str, Any]:
        """Return the answer of `GET /health`: `status`, and for a key that may read all projects also details."""
        content = await self.request("GET", "/health")
        try:
            answer = loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ArtError(f"GET {self.base_url}/health gave no JSON object; is this an ART server?")
        return answer

    async def register(self, request: RegisterRequest) -> ModelStatus:
        what = f"the server to register {request.project}/{request.name} ({request.base_model})"
        return await self.typed(
            ModelStatus, "POST", "/api/models", body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what
        )

    async def page_link(self) -> str:
        """Return an address that opens the server's page in a browser, once, with the rights of this client's key."""
        link = await self.typed(PageLink, "POST", "/view/links", body=Empty())
        return f"{self.base_url}/{LOGIN_MARK}{link.code}"

    async def list_models(self) -> list[ModelCard]:
        """List the models that can be sampled from; the id of each is `project/name`."""
        from art.protocol.answers import ModelList

        return (await self.typed(ModelList, "GET", "/v1/models")).data

    async def model_status(self, project: str, name: str) -> ModelStatus:
        return await self.typed(ModelStatus, "GET", model_path(project, name))

    async def usage(self, *, month: str | None = None, project: str | None = None) -> UsageReport:
        """Return what projects have used in a month, by default the current one."""
        from art.protocol.usage_report import UsageReport

        params = {name: value for name, value in (("month", month), ("project", project)) if value is not None}
        return await self.typed(UsageReport, "GET", "/api/usage", params=params or None)

    async def set_quota(self, project: str | None, quota: Quota) -> UsageReport:
        """Set what a project may use in a month, or with `None` every project without a quota of its own."""
        from art.protocol.usage_report import QuotaRequest, UsageReport

        return await self.typed(UsageReport, "PUT", "/api/quotas", body=QuotaRequest(project=project, quota=quota))

    async def get_rollout(self, rollout_id: str, *, project: str | None = None) -> RolloutRecord:
        """Return a rollout and its recorded conversations; `project` is needed if several projects use the same id."""
        params = None if project is None else {"project": project}
        return await self.typed(RolloutRecord, "GET", _path("rollouts", rollout_id), params=params)

    async def put_rollout(self, rollout_id: str, update: RolloutUpdate) -> RolloutStatus:
        return await self.typed(RolloutStatus, "PUT", _path("rollouts", rollout_id), body=update)

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        params = query.model_dump(mode="json", exclude_none=True)
        return await self.typed(RolloutPage, "GET", "/api/rollouts", params=params)

    async def run_job(
        self, kind: JobKind, project: str, name: str, request: BaseModel, *, show: bool = False
    ) -> JobStatus:
        """Submit a job, again if the server has lost it, and wait for its end, with a progress bar if `show`.

        Raises:
            ArtError: the error that the job ended with.
            JobCancelledError: somebody stopped it.
            ProcessError: the job took longer than `JOB_DEADLINE_S`.
        """
        submit = self.submission(kind, project, name, request)
        with JobView(describe_job(kind, project, name), show=show) as view, announce_wait(view.describe):
            return await self.follow_job(await submit(), view, submit)

    def submission(
        self, kind: JobKind, project: str, name: str, request: BaseModel, instead: Callable[[], BaseModel] | None = None
    ) -> Submit:
        """Make what submits a job.

        Args:
            instead: makes the request in a longer form, for a server that refuses `request`.
        """
        path = model_path(project, name, kind)

        async def submit() -> JobStatus:
            nonlocal request, instead
            try:
                return await self.typed(JobStatus, "POST", path, body=request)
            except (InvalidRequestError, TrajectoryMismatchError) as refusal:
                if instead is None:
                    raise
                logger.debug("the server refused a request in its short form: %s", refusal)
            request, instead = instead(), None
            return await self.typed(JobStatus, "POST", path, body=request)

        return submit

    async def follow_job(self, status: JobStatus, view: JobView, submit: Submit | None = None) -> JobStatus:
        """Wait for the end of a job, over broken connections and restarts of the server.

        Args:
            submit: submits the job again if the server has lost it.

        Raises:
            NotFoundError: the server does not know the job, and there is no `submit`. Else what `run_job` raises.
        """
        deadline = time.monotonic() + JOB_DEADLINE_S
        while status.state not in ENDED:
            try:
                wait_s = SHOWN_POLL_S if view.shows_bar else POLL_S
                status = await self.job_status(status.job_id, wait_s=wait_s)
                view.update(status)
                if status.state not in ENDED and time.monotonic() > deadline:
                    raise ProcessError(f"gave up on {view.what}: job {status.job_id} is still {status.state}")
            except NotFoundError:
                if submit is None:
                    raise
                # The server went down before it stored the job. With the same id it cannot run twice.
                logger.warning("the server does not know job %s (%s): submitting it again", status.job_id, view.what)
                status = await submit()
        if status.state == "cancelled":
            raise JobCancelledError(f"{view.what} was cancelled (job {status.job_id})")
        if status.state == "failed":
            if status.error is None:
                raise ArtError(f"{view.what} failed, and the server gave no reason")
            raise error_from_code(status.error.code, status.error.message, param=status.error.param)
        return status

    async def job_status(self, job_id: str, *, wait_s: float = 0.0) -> JobStatus:
        """Return the state of a job. With `wait_s`, wait until the job has ended, but at most that many seconds."""
        params, timeout_s = {"wait_s": f"{wait_s:g}"}, wait_s + READ_TIMEOUT_S
        return await self.typed(JobStatus, "GET", _path("jobs", job_id), params=params, read_timeout_s=timeout_s)

    async def list_jobs(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List jobs, newest first: those of a project or model, or all that the key may see."""
        params = {"limit": str(limit), "unfinished": "1" if unfinished else "0"}
        params |= {key: value for key, value in (("project", project), ("name", name)) if value is not None}
        return (await self.typed(JobList, "GET", "/api/jobs", params=params)).jobs

    async def cancel_job(self, job_id: str) -> JobStatus:
        """Stop a job; a job that has ended stays as it is. A training stops after its current micro-batch."""
        return await self.typed(JobStatus, "POST", _path("jobs", job_id, "cancel"))


def _path(*parts: str) -> str:
    return "/".join(["/api", *(quote(part, safe="") for part in parts)])


def model_path(project: str, name: str, rest: str = "") -> str:
    """Return the URL path of an endpoint of a model."""
    return _path("models", project, name) + (f"/{rest}" if rest else "")


MAX_CORRUPT = 2
"""Number of times that a file may arrive with the wrong SHA-256 hash before the download fails."""
PARTIAL_CONTENT = 206


async def download(client: HttpClient, place: str, target: Path) -> FileList:
    """Download the files at `place`, a path of the API, as the folder `target`. An equal folder stays as it is.

    A broken download is resumed, and every file is verified. Files are written to a hidden folder beside the target,
    which is renamed at the end. If the program is stopped before, the folder stays and the next call continues with it.

    Raises:
        ConfigError: `target` exists with other content.
        CorruptCheckpointError: a file arrived damaged again and again.
        ArtError: the server refused.
    """
    listed = await client.typed(FileList, "GET", f"{place}/files")
    for info in listed.files:
        if Path(info.name).name != info.name or info.name in ("", ".", ".."):
            raise ArtError(f"{client.base_url} lists a file {info.name!r}, which is no plain file name")
    partial = await asyncio.to_thread(_prepare, target, listed.files)
    if partial is None:
        return listed
    for info in listed.files:
        await _fetch(client, f"{place}/files/{info.name}", partial / info.name, info)
    await asyncio.to_thread(partial.rename, target)
    return listed


def _prepare(target: Path, files: list[FileInfo]) -> Path | None:
    """The folder to download into, with the files of an interrupted call; `None` if the target is complete."""
    if target.exists():
        if all((target / info.name).is_file() and _digest(target / info.name) == info.sha256 for info in files):
            return None
        raise ConfigError(f"{target} exists and is not this checkpoint; give another path, or remove it", param="path")
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    names = {info.name for info in files}
    for entry in partial.iterdir():
        if entry.name not in names:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return partial


async def _fetch(client: HttpClient, path: str, file: Path, info: FileInfo) -> None:
    num_corrupt = 0
    while True:
        if (here := _size(file)) >= info.size:
            if await asyncio.to_thread(_digest, file) == info.sha256:
                return
            await asyncio.to_thread(file.unlink)
            here, num_corrupt = 0, num_corrupt + 1  # e.g. part of another version of the file
            if num_corrupt > MAX_CORRUPT:
                raise CorruptCheckpointError(f"{client.base_url}{path} came {num_corrupt} times with another sha256")
        await client.until_answered(partial(_receive, client, path, file, here, info), f"GET {path}")


async def _receive(client: HttpClient, path: str, file: Path, here: int, info: FileInfo) -> None:
    headers = {"Range": f"bytes={here}-", "If-Range": f'"{info.sha256}"'} if here > 0 else {}
    try:
        async with client.stream(path, headers=headers) as response:
            resumed = response.status_code == PARTIAL_CONTENT
            with file.open("ab" if resumed else "wb") as writer:
                async for piece in response.aiter_bytes():
                    writer.write(piece)
                    note_detail(f"{file.name}: {writer.tell() / 2**20:.0f} of {info.size / 2**20:.0f} MiB")
        if (received := _size(file)) < info.size:
            raise LostAnswerError(f"the answer ended at byte {received} of {info.size}")
    except LostAnswerError:
        if _size(file) <= here:  # otherwise the caller goes on from there at once
            raise


def _size(file: Path) -> int:
    """Size in bytes, and -1 if there is no file: an empty file exists."""
    return file.stat().st_size if file.exists() else -1


def _digest(file: Path) -> str:
    with file.open("rb") as reader:
        return hashlib.file_digest(reader, "sha256").hexdigest()
