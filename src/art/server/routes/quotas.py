"""What projects have used in a month, and their quotas. A key for one project sees its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from art.errors import InvalidRequestError, PermissionDeniedError
from art.protocol.organisation.usage_report import OTHER_KEYS, KeyUsage, QuotaRequest, UsageReport, Used
from art.server.auth import Caller
from art.server.call import Call, Route
from art.storage.layout import validate_name


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
    Route(
        "GET", "/api/usage", get_usage, scope="infer", response=UsageReport, 
        query={"month": str, "project": str, "keys": bool}, from_page=True,
    ),
    Route("PUT", "/api/quotas", set_quota, scope="admin", request=QuotaRequest, response=UsageReport),
]  # fmt: skip
