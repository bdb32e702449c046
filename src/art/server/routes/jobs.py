"""Jobs: read their state, follow their events, cancel them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response

from art.errors import InvalidRequestError
from art.protocol.training import JobEvent, JobList, JobStatus
from art.server.answers import UNBUFFERED, EventStream, cancel_on_disconnect
from art.server.call import ApiCall, Routes, whole_number

ROUTES = Routes()

MAX_WAIT_S = 60.0
"""Longest time that a status request waits for its job to end."""
MAX_LISTED = 1000
RETRY_MS = 1000
"""Milliseconds after which a browser reconnects to a broken stream of events."""
NO_CONTENT = 204


@ROUTES.add("GET", "/api/jobs/{job_id}", scope="infer", query={"wait_s": float}, from_page=True)
async def job_status(call: ApiCall) -> JobStatus:
    """Return the state of a job. With `wait_s` the answer waits up to that many seconds for the job to end."""
    try:
        wait_s = float(call.query("wait_s") or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s < float("inf"):
        text = call.query("wait_s")
        raise InvalidRequestError(f"`wait_s` must be a number of seconds >= 0, got {text!r}", param="wait_s")
    async with cancel_on_disconnect(call.request):
        return await call.runtime.jobs.wait(call.path["job_id"], min(wait_s, MAX_WAIT_S))


@ROUTES.add(
    "GET", "/api/jobs", scope="infer", query={"project": str, "name": str, "unfinished": bool, "limit": int},
    from_page=True,
)  # fmt: skip
async def list_jobs(call: ApiCall) -> JobList:
    """List jobs, newest first. A key for one project sees the jobs of that project."""
    project = call.query("project")
    if call.caller.project is not None:
        call.caller.check_project(project or call.caller.project)
        project = call.caller.project
    limit = whole_number("limit", call.query("limit") or "100", most=MAX_LISTED)
    unfinished = call.query("unfinished") in ("1", "true")
    jobs = await call.runtime.jobs.find(project=project, name=call.query("name"), unfinished=unfinished, limit=limit)
    return JobList(jobs=jobs)


@ROUTES.add("POST", "/api/jobs/{job_id}/cancel", scope="train", status=202, from_page=True)
async def cancel_job(call: ApiCall) -> JobStatus:
    """Stop a job. A job that has ended stays as it is."""
    return await call.runtime.jobs.cancel(call.path["job_id"])


@ROUTES.add(
    "GET", "/api/jobs/{job_id}/events", scope="infer", media=("text/event-stream",), query={"after": int},
    from_page=True,
)  # fmt: skip
async def job_events(call: ApiCall) -> Response:
    """Stream a job's events after number `Last-Event-ID`, until the job has ended. Status 204 if there are no more."""
    after = whole_number("Last-Event-ID", call.header("last-event-id") or call.query("after") or "0")
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
