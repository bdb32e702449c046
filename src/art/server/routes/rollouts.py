"""Rollouts that other programs run under a base URL of their own: what was recorded, its reward, and lists of them."""

from __future__ import annotations

from typing import Any

from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.server.call import Call, Route


async def get_rollout(call: Call) -> RolloutRecord:
    return await call.runtime.gateway.rollouts.get(call.path["rollout_id"], call.query("project"))


async def put_rollout(call: Call) -> RolloutStatus:
    update = await call.body(RolloutUpdate)
    return await call.runtime.gateway.rollouts.put(call.path["rollout_id"], update, None)


async def list_rollouts(call: Call) -> RolloutPage:
    given: dict[str, Any] = {name: call.query(name) for name in RolloutQuery.model_fields}
    query = RolloutQuery.model_validate({name: value for name, value in given.items() if value is not None})
    return await call.runtime.gateway.rollouts.page(query)


ROUTES = [
    Route("GET", "/api/rollouts", list_rollouts),
    Route("GET", "/api/rollouts/{rollout_id}", get_rollout),
    Route("PUT", "/api/rollouts/{rollout_id}", put_rollout),
]
