"""Rollouts that other programs run under a base URL of their own: read the record, set the reward, list rollouts."""

from __future__ import annotations

from typing import Any

from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.server.call import Call, Route


async def get_rollout(call: Call) -> RolloutRecord:
    """Return the outcome of a rollout, and the conversations recorded under its base URL."""
    return await call.runtime.gateway.rollouts.get(call.path["rollout_id"], _project(call, call.query("project")))


async def put_rollout(call: Call) -> RolloutStatus:
    """Set the group, reward or outcome of a rollout."""
    update = await call.body(RolloutUpdate)
    for project in (update.project, update.model and update.model.partition("/")[0]):
        _project(call, project)
    return await call.runtime.gateway.rollouts.put(call.path["rollout_id"], update, call.caller.project)


async def list_rollouts(call: Call) -> RolloutPage:
    """List rollouts in the order of their last change."""
    values: dict[str, Any] = {name: call.query(name) for name in RolloutQuery.model_fields}
    values["project"] = _project(call, values["project"])
    query = RolloutQuery.model_validate({name: value for name, value in values.items() if value is not None})
    return await call.runtime.gateway.rollouts.page(query)


def _project(call: Call, asked: str | None) -> str | None:
    """The project that the request names, or the only project of the key.

    Raises:
        PermissionDeniedError: the request names another project than the key's.
    """
    if asked is not None:
        call.caller.check_project(asked)
    return asked or call.caller.project


_ROLLOUT = "/api/rollouts/{rollout_id}"
_QUERY = {
    "project": str, "model": str, "group_id": str, "finished": bool, "trained": bool, "outcome": str, "since": int,
    "limit": int,
}  # fmt: skip
ROUTES = [
    Route("GET", "/api/rollouts", list_rollouts, scope="infer", response=RolloutPage, query=_QUERY),
    Route("GET", _ROLLOUT, get_rollout, scope="infer", response=RolloutRecord, query={"project": str}),
    Route("PUT", _ROLLOUT, put_rollout, scope="train", request=RolloutUpdate, response=RolloutStatus),
]
