"""Routes for operators: health, readiness, metrics, the OpenAPI document; what projects have used, and quotas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from art.errors import InvalidRequestError, PermissionDeniedError
from art.protocol.answers import Health, OpenApi, Readiness
from art.protocol.organisation.usage_report import OTHER_KEYS, KeyUsage, QuotaRequest, UsageReport, Used
from art.server.answers import json_response
from art.server.auth import Caller
from art.server.call import Call, Route
from art.server.metrics import CONTENT_TYPE
from art.storage.layout import validate_name

NOT_READY = 503


async def health(call: Call) -> dict[str, Any]:
    """Return status `ok` if the server answers at all, and details for a key for all projects."""
    return await call.runtime.health() if _is_trusted(call) else {"status": "ok"}


async def ready(call: Call) -> Response:
    """Return whether the server is ready for work; HTTP status 503 if not."""
    if call.server.is_draining:
        obstacles = {"server": "it is shutting down"}
    else:
        obstacles = await call.server.obstacles(call.runtime.obstacles)
    answer = Readiness(ready=not obstacles, obstacles=obstacles if _is_trusted(call) else {})
    status = 200 if answer.ready else NOT_READY
    return json_response(call.without_paths(answer.model_dump_json().encode()), status)


async def metrics(call: Call) -> Response:
    """Return current numbers and totals in the text format of Prometheus."""
    if call.caller.project is not None:
        raise PermissionDeniedError("metrics cover all projects; use a key that is not limited to one project")
    measurements = [*call.server.measurements(), *await call.runtime.measurements()]
    return Response(call.server.metrics.render(measurements), media_type=CONTENT_TYPE)


async def openapi(call: Call) -> Response:
    """Return this OpenAPI document."""
    return json_response(await asyncio.to_thread(call.server.openapi))


def _is_trusted(call: Call) -> bool:
    """Whether the caller may see details such as base models, which can be folders of the machine: only keys for all
    projects may."""
    return call.caller.project is None and call.caller.may("infer")


async def get_usage(call: Call) -> UsageReport:
    """Tokens, training steps, device seconds and costs by project, in `month` (such as 2026-01; default: this one).

    With `keys=true` also by API key. A key without scope `admin` sees its own, and the others as one.
    """
    month, project, keys = call.query("month"), call.query("project"), call.query("keys")
    if month is not None and re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month) is None:
        problem = f"`month` must be a year and a month, such as 2026-01; got {month[:40]!r}"
        raise InvalidRequestError(problem, param="month")
    if keys not in (None, "true", "false"):
        raise InvalidRequestError(f"`keys` must be true or false, got {keys[:40]!r}", param="keys")
    if project is not None:
        call.caller.check_project(validate_name(project, param="project"))
    report = await call.runtime.usage.report(month, project or call.caller.project, with_keys=keys == "true")
    if keys == "true":
        names = call.server.keyring.names()
        for usage in report.projects:
            usage.keys = _visible(usage.keys or [], names, call.caller)
    return report


def _visible(keys: list[KeyUsage], names: Mapping[str, str], caller: Caller) -> list[KeyUsage]:
    """Add the names of keys. A caller without scope `admin` gets its own key, and the others as one: which keys there
    are, and who has them, is not for every key of a project."""
    named = [one.model_copy(update={"name": names.get(one.key_id or "")}) for one in keys]
    if caller.may("admin"):
        return named
    own = [one for one in named if one.key_id == caller.key_id]
    others = [one for one in named if one.key_id != caller.key_id]
    if others:
        sums = {field: sum(getattr(one, field) for one in others) for field in Used.model_fields}
        own.append(KeyUsage(key_id=None, name=OTHER_KEYS, **sums))
    return own


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
    Route("GET", "/health", health, scope=None, response=Health),
    Route("GET", "/ready", ready, scope=None, response=Readiness),
    Route("GET", "/metrics", metrics, scope="infer", media=("text/plain",)),
    Route("GET", "/openapi.json", openapi, scope=None, response=OpenApi),
    Route(
        "GET", "/api/usage", get_usage, scope="infer", response=UsageReport, 
        query={"month": str, "project": str, "keys": bool}, from_page=True,
    ),
    Route("PUT", "/api/quotas", set_quota, scope="admin", request=QuotaRequest, response=UsageReport),
]  # fmt: skip
