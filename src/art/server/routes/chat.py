"""`/v1/chat/completions`, with and without a rollout in the URL."""

from __future__ import annotations

from typing import Any

from art.protocol.chat import parse_chat_request
from art.server.asgi import cancel_on_disconnect, send_events
from art.server.call import Call, Route


async def chat_completions(call: Call) -> dict[str, Any] | None:
    request = parse_chat_request(await call.json())
    rollout_id = call.path.get("rollout_id")
    gateway = call.runtime.gateway
    async with cancel_on_disconnect(call.receive):
        if not request.stream:
            return await gateway.complete(request, rollout_id=rollout_id)
        await send_events(call.send, await gateway.stream(request, rollout_id=rollout_id))
    return None


ROUTES = [
    Route("POST", "/v1/chat/completions", chat_completions),
    Route("POST", "/rollouts/{rollout_id}/v1/chat/completions", chat_completions),
]
