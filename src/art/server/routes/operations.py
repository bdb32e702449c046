"""Routes for operators: health, readiness, metrics, the OpenAPI document; what projects have used, and quotas."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.responses import Response

from art.errors import InvalidRequestError, PermissionDeniedError
from art.protocol.answers import Health, OpenApi, Readiness
from art.protocol.usage_report import QuotaRequest, UsageReport
from art.server.answers import json_response
from art.server.call import ApiCall, Routes
from art.server.state import CONTENT_TYPE
from art.storage.layout import validate_name

ROUTES = Routes()

NOT_READY = 503


@ROUTES.add("GET", "/health", scope=None, response=Health)
async def health(call: ApiCall) -> dict[str, Any]:
    """Return status `ok` if the server answers at all, and details for a key for all projects."""
    return await call.runtime.health() if _is_trusted(call) else {"status": "ok"}


@ROUTES.add("GET", "/ready", scope=None, response=Readiness)
async def ready(call: ApiCall) -> Response:
    """Return whether the server is ready for work; HTTP status 503 if not."""
    obstacles = await call.server.obstacles(call.runtime.obstacles)
    answer = Readiness(ready=not obstacles, obstacles=obstacles if _is_trusted(call) else {})
    status = 200 if answer.ready else NOT_READY
    return json_response(call.without_paths(answer.model_dump_json().encode()), status)


@ROUTES.add("GET", "/metrics", scope="infer", media=("text/plain",))
async def metrics(call: ApiCall) -> Response:
    """Return current numbers and totals in the text format of Prometheus."""
    if call.caller.project is not None:
        raise PermissionDeniedError("metrics cover all projects; use a key that is not limited to one project")
    measurements = [*call.server.measurements(), *await call.runtime.measurements()]
    return Response(call.server.metrics.render(measurements), media_type=CONTENT_TYPE)


@ROUTES.add("GET", "/openapi.json", scope=None, response=OpenApi)
async def openapi(call: ApiCall) -> Response:
    """Return this OpenAPI document."""
    return json_response(await asyncio.to_thread(call.server.openapi))


def _is_trusted(call: ApiCall) -> bool:
    """Whether the caller may see details such as base models, which can be folders of the machine: only keys for all
    projects may."""
    return call.caller.project is None and call.caller.may("infer")


@ROUTES.add("GET", "/api/usage", scope="infer", query={"month": str, "project": str}, from_page=True)
async def get_usage(call: ApiCall) -> UsageReport:
    """Tokens, training steps, device seconds and costs by project, in `month` (such as 2026-01; default: this one)."""
    month, project = call.query("month"), call.query("project")
    if month is not None and re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month) is None:
        problem = f"`month` must be a year and a month, such as 2026-01; got {month[:40]!r}"
        raise InvalidRequestError(problem, param="month")
    if project is not None:
        call.caller.check_project(validate_name(project, param="project"))
    return await call.runtime.usage.report(month, project or call.caller.project)


@ROUTES.add("PUT", "/api/quotas", scope="admin")
async def set_quota(call: ApiCall, request: QuotaRequest) -> UsageReport:
    """Set what a project may use in a month. The key must have scope `admin` and be for all projects."""
    if call.caller.project is not None:
        raise PermissionDeniedError(
            f"quotas are set by the operator; key {call.caller.key_id} is for project {call.caller.project!r} only"
        )
    if request.project is not None:
        validate_name(request.project, param="project")
    await call.runtime.usage.set_quota(request.project, request.quota)
    return await call.runtime.usage.report(None, None)
