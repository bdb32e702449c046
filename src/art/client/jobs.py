"""Follows a job to its end by its events, which continue after a broken connection, or else by asking for its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Self, cast
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from art.client.http import READ_TIMEOUT_S, HttpClient, LostAnswerError
from art.client.waiting import announce_wait
from art.errors import (
    ArtError,
    InvalidRequestError,
    JobCancelledError,
    NotFoundError,
    ProcessError,
    TrajectoryMismatchError,
    error_from_code,
)
from art.protocol.job_states import ENDED, JobKind
from art.protocol.jobs import JobEvent, JobList
from art.protocol.training import JobProgress, JobStatus

logger = logging.getLogger(__name__)

JOB_DEADLINE_S = 24 * 3600.0
POLL_S = 20.0
SILENCE_S = 40.0
"""Silence after which a stream of events counts as broken. The server sends a sign of life four times as often."""
MAX_SILENT_STREAMS = 2
"""After this many streams in a row without an event, ask for the job's state instead: a proxy may hold events back."""
_NAMES = {"train": "training", "train_sft": "supervised fine-tuning"}
"""Names of jobs in messages, where they are not those of their kind."""


class JobClient(HttpClient):
    """A client of one server that submits, follows and stops jobs."""

    async def run_job(
        self,
        kind: JobKind,
        project: str,
        name: str,
        request: BaseModel,
        *,
        instead: Callable[[], BaseModel] | None = None,
        show: bool = False,
    ) -> JobStatus:
        """Submit a job, again if the server has lost it, and wait for its end, with a progress bar if `show`.

        Args:
            instead: makes the request in a longer form, for a server that refuses `request`.

        Raises:
            ArtError: the error that the job ended with.
            JobCancelledError: somebody stopped it.
            ProcessError: the job took longer than `JOB_DEADLINE_S`.
        """
        submit = self.submission(kind, project, name, request, instead)
        with JobView(submit.what, show=show) as view, announce_wait(view.describe):
            return await self.follow_job(await submit.send(), view, submit)

    def submission(
        self, kind: JobKind, project: str, name: str, request: BaseModel, instead: Callable[[], BaseModel] | None = None
    ) -> Submission:
        """Prepare what submits a job. Its arguments are those of `run_job`."""
        send = partial(self.typed, JobStatus, "POST", model_path(project, name, kind))
        return Submission(describe_job(kind, project, name), send, request, instead)

    async def follow_job(self, status: JobStatus, view: JobView, submit: Submission | None = None) -> JobStatus:
        """Wait for the end of a job, over broken connections and restarts of the server.

        Args:
            submit: submits the job again if the server has lost it.

        Raises:
            NotFoundError: the server does not know the job, and there is no `submit`. Else what `run_job` raises.
        """
        deadline = time.monotonic() + JOB_DEADLINE_S
        while status.state not in ENDED:
            try:
                status = await self._follow(status.job_id, view, deadline)
            except NotFoundError:
                if submit is None:
                    raise
                # The server went down before it stored the job. With the same id it cannot run twice.
                logger.warning("the server does not know job %s (%s): submitting it again", status.job_id, view.what)
                status = await submit.send()
        if status.state == "cancelled":
            raise JobCancelledError(f"{view.what} was cancelled (job {status.job_id})")
        if status.state == "failed":
            if status.error is None:
                raise ArtError(f"{view.what} failed, and the server gave no reason")
            raise error_from_code(status.error.code, status.error.message, param=status.error.param)
        return status

    async def _follow(self, job_id: str, view: JobView, deadline: float) -> JobStatus:
        """The status of a job once it has ended.

        Raises:
            NotFoundError: the server does not know it.
            ProcessError: the job had not ended at `deadline`.
        """
        after, num_silent = 0, 0
        while True:
            if num_silent < MAX_SILENT_STREAMS:
                num_silent += 1
                try:
                    # Closed here, because the garbage collector might close the generator in another event loop.
                    events = contextlib.aclosing(self.job_events(job_id, after=after))
                    async with asyncio.timeout(deadline - time.monotonic()), events as stream:
                        async for event in stream:
                            num_silent, after = 0, event.number or after
                            view.update(event)
                            if event.status is not None:
                                return event.status
                except LostAnswerError as lost:
                    logger.debug("the events of job %s broke off after number %d: %s", job_id, after, lost)
                except NotFoundError:
                    num_silent = MAX_SILENT_STREAMS  # no such job, or a server without events: its status tells which
                except TimeoutError:
                    pass
            # This also waits for a server that is being restarted.
            status = await self.job_status(job_id, wait_s=POLL_S if num_silent == MAX_SILENT_STREAMS else 0.0)
            view.update(status)
            if status.state in ENDED:
                return status
            if time.monotonic() > deadline:
                raise ProcessError(f"gave up on {view.what}: job {job_id} is still {status.state}")

    async def job_status(self, job_id: str, *, wait_s: float = 0.0) -> JobStatus:
        """Return the state of a job. With `wait_s`, wait until the job has ended, but at most that many seconds."""
        params, timeout_s = {"wait_s": f"{wait_s:g}"}, wait_s + READ_TIMEOUT_S
        return await self.typed(JobStatus, "GET", _job_path(job_id), params=params, read_timeout_s=timeout_s)

    async def job_events(self, job_id: str, *, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield the events of a job with a number above `after`; the last one has the job's status.

        Raises:
            NotFoundError: there is no such job, or the server has no events.
            LostAnswerError: the connection broke; continue after the number of the last event.
        """
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        path = f"{_job_path(job_id)}/events"
        async with (
            self.stream(path, headers=headers, read_timeout_s=SILENCE_S) as response,
            contextlib.aclosing(cast("AsyncGenerator[str, None]", response.aiter_lines())) as lines,
        ):
            async for line in lines:
                if line.startswith("data:"):  # each event of ART is one line and repeats its id and kind
                    try:
                        yield JobEvent.model_validate_json(line[5:])
                    except ValidationError as error:
                        raise ArtError(
                            f"{path} gave no JobEvent; are server and client of the same version? {error}"
                        ) from error

    async def list_jobs(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List jobs, newest first: those of a project or model, or all that the key may see."""
        params = {"limit": str(limit), "unfinished": "1" if unfinished else "0"}
        params |= {key: value for key, value in (("project", project), ("name", name)) if value is not None}
        return (await self.typed(JobList, "GET", "/api/jobs", params=params)).jobs

    async def cancel_job(self, job_id: str) -> JobStatus:
        """Stop a job; a job that has ended stays as it is. A training stops after its current micro-batch."""
        return await self.typed(JobStatus, "POST", f"{_job_path(job_id)}/cancel")


class Submission:
    """Sends the request for a job, in its longer form once the server has refused the short one."""

    def __init__(
        self,
        what: str,
        send: Callable[..., Awaitable[JobStatus]],
        request: BaseModel,
        instead: Callable[[], BaseModel] | None,
    ) -> None:
        self.what = what
        """Name of the job in messages."""
        self._send = send
        self._request = request
        self._instead = instead

    async def send(self) -> JobStatus:
        try:
            return await self._send(body=self._request)
        except (InvalidRequestError, TrajectoryMismatchError) as refusal:
            if self._instead is None:
                raise
            logger.debug("the server refused a request in its short form: %s", refusal)
        self._request, self._instead = self._instead(), None
        return await self._send(body=self._request)


class JobView:
    """Shows the user a job for which a call waits, in words and as a progress bar."""

    def __init__(self, what: str, *, show: bool = False) -> None:
        self.what = what
        self._detail = ""
        self._show = show
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def describe(self) -> str:
        """Describe the job in words, e.g. "training of p/m (queued at place 2)"."""
        return f"{self.what} ({self._detail})" if self._detail else self.what

    def update(self, now: JobEvent | JobStatus) -> None:
        if now.queue_place is not None:
            self._detail = f"queued at place {now.queue_place}"
        elif now.progress is not None:
            self._detail = f"{now.progress.phase}: {now.progress.done} of {now.progress.total}"
            self._draw(now.progress)
        elif now.state is not None:
            self._detail = now.state

    def _draw(self, progress: JobProgress) -> None:
        if not self._show:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=self.what, leave=False)
        self._bar.total, self._bar.n = progress.total, progress.done
        self._bar.set_postfix_str(progress.phase)


def model_path(project: str, name: str, rest: str = "") -> str:
    """Return the URL path of an endpoint of a model."""
    path = f"/api/models/{quote(project, safe='')}/{quote(name, safe='')}"
    return f"{path}/{rest}" if rest else path


def describe_job(kind: JobKind, project: str, name: str) -> str:
    """Name a job in messages, e.g. "training of p/m"."""
    return f"{_NAMES.get(kind, f'the {kind}')} of {project}/{name}"


def _job_path(job_id: str) -> str:
    return f"/api/jobs/{quote(job_id, safe='')}"
