"""Jobs: read their state, follow their events, cancel them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response

from art.errors import InvalidRequestError
from art.protocol.jobs import JobEvent, JobList
from art.protocol.training import JobStatus
from art.server.answers import UNBUFFERED, EventStream, cancel_on_disconnect
from art.server.call import Call, Route

MAX_WAIT_S = 60.0
"""Longest time that a status request waits for its job to end."""
MAX_LISTED = 1000
RETRY_MS = 1000
"""Milliseconds after which a browser reconnects to a broken stream of events."""
NO_CONTENT = 204


async def job_status(call: Call) -> JobStatus:
    """Return the state of a job. With `wait_s` the answer waits up to that many seconds for the job to end."""
    wait_s = _wait_s(call.query("wait_s"))
    async with cancel_on_disconnect(call.request):
        return await call.runtime.jobs.wait(call.path["job_id"], wait_s)


async def list_jobs(call: Call) -> JobList:
    """List jobs, newest first. A key for one project sees the jobs of that project."""
    project = call.query("project")
    if call.caller.project is not None:
        call.caller.check_project(project or call.caller.project)
        project = call.caller.project
    limit = _whole_number("limit", call.query("limit") or "100", most=MAX_LISTED)
    unfinished = call.query("unfinished") in ("1", "true")
    jobs = await call.runtime.jobs.find(project=project, name=call.query("name"), unfinished=unfinished, limit=limit)
    return JobList(jobs=jobs)


async def cancel_job(call: Call) -> JobStatus:
    """Stop a job. A job that has ended stays as it is."""
    return await call.runtime.jobs.cancel(call.path["job_id"])


async def job_events(call: Call) -> Response:
    """Stream a job's events after number `Last-Event-ID`, until the job has ended. Status 204 if there are no more."""
    after = _whole_number("Last-Event-ID", call.header("last-event-id") or call.query("after") or "0")
    events = call.runtime.jobs.events(call.path["job_id"], after)
    async with cancel_on_disconnect(call.request):
        first = await anext(events, ...)
    if first is ...:
        return Response(status_code=NO_CONTENT)

    async def frames() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(events):
            yield f"retry: {RETRY_MS}\n\n".encode() + call.without_paths(_frame(first))
            async for event in events:
                yield call.without_paths(_frame(event))

    return EventStream(frames(), UNBUFFERED)


def _frame(event: JobEvent | None) -> bytes:
    """One server-sent event; for `None` a comment (a line with a leading colon), which keeps the connection alive."""
    if event is None:
        return b": alive\n\n"
    number = "" if event.number is None else f"id: {event.number}\n"
    return f"{number}event: {event.kind}\ndata: {event.model_dump_json(exclude_none=True)}\n\n".encode()


def _whole_number(name: str, text: str, *, most: int = 2**53) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 16 or int(text) > most:
        raise InvalidRequestError(f"`{name}` must be a whole number from 0 to {most}, got {text[:40]!r}", param=name)
    return int(text)


def _wait_s(text: str | None) -> float:
    try:
        wait_s = float(text or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s < float("inf"):
        raise InvalidRequestError(f"`wait_s` must be a number of seconds >= 0, got {text!r}", param="wait_s")
    return min(wait_s, MAX_WAIT_S)


ROUTES = [
    Route(
        "GET", "/api/jobs", list_jobs, scope="infer", response=JobList,
        query={"project": str, "name": str, "unfinished": bool, "limit": int}, from_page=True,
    ),
    Route(
        "GET", "/api/jobs/{job_id}", job_status, scope="infer", response=JobStatus, query={"wait_s": float},
        from_page=True,
    ),
    Route(
        "GET", "/api/jobs/{job_id}/events", job_events, scope="infer", media=("text/event-stream",),
        query={"after": int}, from_page=True,
    ),
    Route(
        "POST", "/api/jobs/{job_id}/cancel", cancel_job, scope="train", response=JobStatus, status=202, from_page=True
    ),
]  # fmt: skip
