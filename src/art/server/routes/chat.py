"""`/v1/chat/completions`, with and without a project and a rollout in the URL."""

from __future__ import annotations

from typing import Any

from art.protocol.answers import ChatAnswer
from art.protocol.chat import ChatRequest, parse_chat_request
from art.server.asgi import cancel_on_disconnect, send_events
from art.server.call import INFERENCE_BASES, Call, Route


async def chat_completions(call: Call) -> dict[str, Any] | None:
    """Sample answers to a conversation, as OpenAI's API does."""
    request = parse_chat_request(await call.json())
    request.model = await call.own_model(request.model)
    rollout_id = call.path.get("rollout_id")
    gateway = call.runtime.gateway
    async with cancel_on_disconnect(call.receive):
        if not request.stream:
            return await gateway.complete(request, rollout_id=rollout_id)
        stream = await gateway.stream(request, rollout_id=rollout_id)
        await send_events(call.send, stream.chunks)
    return None


ROUTES = [
    Route(
        "POST",
        f"{base}/chat/completions",
        chat_completions,
        scope="infer",
        samples=True,
        request=ChatRequest,
        response=ChatAnswer,
        media=("application/json", "text/event-stream"),
    )
    for base in INFERENCE_BASES
]
