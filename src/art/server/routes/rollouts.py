"""What was recorded under a rollout's base URL, ready to be made a trajectory."""

from __future__ import annotations

from typing import Any

from art.server.call import Call, Route


async def get_rollout(call: Call) -> dict[str, Any]:
    rollout_id = call.path["rollout_id"]
    return {"rollout_id": rollout_id, "histories": await call.runtime.gateway.histories(rollout_id)}


ROUTES = [Route("GET", "/api/rollouts/{rollout_id}", get_rollout)]
