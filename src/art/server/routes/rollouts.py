"""What was recorded under a rollout's base URL, ready to be made a trajectory."""

from __future__ import annotations

from typing import Any

from art.protocol.answers import RolloutAnswer
from art.server.call import Call, Route


async def get_rollout(call: Call) -> dict[str, Any]:
    """The conversations recorded under a rollout's base URL."""
    rollout_id = call.path["rollout_id"]
    histories = await call.runtime.gateway.histories(rollout_id, project=call.caller.project)
    return {"rollout_id": rollout_id, "histories": histories}


ROUTES = [Route("GET", "/api/rollouts/{rollout_id}", get_rollout, scope="infer", response=RolloutAnswer)]
