"""Jobs: read their state, wait for their end, cancel them."""

from __future__ import annotations

from art.errors import InvalidRequestError
from art.protocol.training import JobList, JobStatus
from art.server.answers import cancel_on_disconnect
from art.server.call import ApiCall, Routes, whole_number

ROUTES = Routes()

MAX_WAIT_S = 60.0
"""Longest time that a status request waits for its job to end."""
MAX_LISTED = 1000


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
