"""What projects have used in a month, and their quotas. A key for one project sees its own."""

from __future__ import annotations

import re

from art.errors import InvalidRequestError, PermissionDeniedError
from art.protocol.organisation.usage_report import QuotaRequest, UsageReport
from art.server.call import Call, Route
from art.storage.layout import validate_name


async def get_usage(call: Call) -> UsageReport:
    """Tokens, training steps, device seconds and costs by project, in `month` (such as 2026-01; default: this one)."""
    month, project = call.query("month"), call.query("project")
    if month is not None and re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month) is None:
        problem = f"`month` must be a year and a month, such as 2026-01; got {month[:40]!r}"
        raise InvalidRequestError(problem, param="month")
    if project is not None:
        call.caller.check_project(validate_name(project, param="project"))
    return await call.runtime.usage.report(month, project or call.caller.project)


async def set_quota(call: Call) -> UsageReport:
    """Set what a project may use in a month. The key must have scope `admin` and be for all projects."""
    request = await call.body(QuotaRequest)
    if call.caller.project is not None:
        raise PermissionDeniedError(
            f"quotas are set by the operator; key {call.caller.key_id} is for project {call.caller.project!r} only"
        )
    if request.project is not None:
        validate_name(request.project, param="project")
    await call.runtime.usage.set_quota(request.project, request.quota)
    return await call.runtime.usage.report(None, None)


ROUTES = [
    Route(
        "GET", "/api/usage", get_usage, scope="infer", response=UsageReport, query={"month": str, "project": str},
        from_page=True,
    ),
    Route("PUT", "/api/quotas", set_quota, scope="admin", request=QuotaRequest, response=UsageReport),
]  # fmt: skip
