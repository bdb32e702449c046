"""A chat server of aiohttp whose answers, failures and delays are scripted, and which keeps what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]

MESSAGE = {"role": "assistant", "content": "hi", "tool_calls": None}
COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "p/m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE, "exchange_id": "e-1"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}  # fmt: skip


def answer(status: int = 200, body: Any = COMPLETION, **headers: str) -> Behaviour:
    """An answer with `body` as JSON, or with exactly these bytes. Headers are named with `_` for `-`."""

    async def behave(_: web.Request) -> web.StreamResponse:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return web.Response(status=status, body=content, headers=named)

    return behave


def zipped(body: Any = COMPLETION) -> Behaviour:
    return answer(200, gzip.compress(json.dumps(body).encode()), content_encoding="gzip")


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    """Half of an answer."""
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")  # type: ignore[attr-defined]
    request.transport.close()
    return web.Response()


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(2.0)
    return web.Response()


@dataclass(frozen=True)
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedChat:
    script: list[Behaviour] = field(default_factory=list)
    """What happens to the next requests, one each; then `then`."""
    then: Behaviour = field(default_factory=answer)
    seen: list[Seen] = field(default_factory=list)
    base_url: str = ""
    port: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.path_qs, dict(request.headers), await request.read()))
        return await (self.script.pop(0) if self.script else self.then)(request)

    @contextlib.asynccontextmanager
    async def running(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[ScriptedChat]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        self.port = runner.addresses[0][1]
        self.base_url = f"{'https' if tls else 'http'}://{host}:{self.port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()
