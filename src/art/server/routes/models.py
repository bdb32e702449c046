"""`/v1/models`: what can be sampled from, as OpenAI lists it."""

from __future__ import annotations

from typing import Any

from art.server.call import Call, Route


async def list_models(call: Call) -> dict[str, Any]:
    models = await call.runtime.list_models()
    return {
        "object": "list",
        "data": [
            {
                "id": model.inference_name,
                "object": "model",
                "created": 0,
                "owned_by": model.project,
                "base_model": model.base_model,
                "step": model.step,
            }
            for model in models
        ],
    }


ROUTES = [Route("GET", "/v1/models", list_models), Route("GET", "/rollouts/{rollout_id}/v1/models", list_models)]
