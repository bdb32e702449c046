"""Enough of OpenAI's API for the SDK's tests of chat completions: every answer is well-formed, none means anything.

python stub_api.py PORT
"""

from __future__ import annotations

import json
import sys
from typing import Any

from aiohttp import web

MESSAGE = {"role": "assistant", "content": "hi", "refusal": None}
COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE, "logprobs": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}  # fmt: skip
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
app = web.Application()
routes = web.RouteTableDef()


def page(item: Any) -> web.Response:
    return web.json_response({"object": "list", "data": [item], "first_id": "a", "last_id": "a", "has_more": False})


@routes.post("/chat/completions")
async def create(request: web.Request) -> web.Response:
    if (await request.json()).get("stream"):
        text = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")
    return web.json_response(COMPLETION)


@routes.get("/chat/completions")
async def list_all(_: web.Request) -> web.Response:
    return page(COMPLETION)


@routes.get("/chat/completions/{id}")
@routes.post("/chat/completions/{id}")
async def one(_: web.Request) -> web.Response:
    return web.json_response(COMPLETION)


@routes.delete("/chat/completions/{id}")
async def delete(_: web.Request) -> web.Response:
    return web.json_response({"id": "chatcmpl-1", "object": "chat.completion.deleted", "deleted": True})


@routes.get("/chat/completions/{id}/messages")
async def messages(_: web.Request) -> web.Response:
    return page(MESSAGE | {"id": "msg-1"})


app.add_routes(routes)
if __name__ == "__main__":
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: print("ready", flush=True))
