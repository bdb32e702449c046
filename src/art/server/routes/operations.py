"""What those who run a server ask: is it there, is it ready for work, how much does it do, what can it be asked."""

from __future__ import annotations

import asyncio
from typing import Any

from art.errors import PermissionDeniedError
from art.protocol.answers import Health, OpenApi, Readiness
from art.server.asgi import send_bytes
from art.server.call import Call, Route
from art.server.prometheus import CONTENT_TYPE

NOT_READY = 503


async def health(call: Call) -> dict[str, Any]:
    """Whether the server answers at all."""
    return await call.runtime.health() if _is_trusted(call) else {"status": "ok"}


async def ready(call: Call) -> None:
    """Whether the server can be given work; with status 503 if not."""
    if call.server.is_draining:
        obstacles = {"server": "it is ending"}
    else:
        obstacles = await call.server.obstacles(call.runtime.obstacles)
    answer = Readiness(ready=not obstacles, obstacles=obstacles if _is_trusted(call) else {})
    status = 200 if answer.ready else NOT_READY
    await send_bytes(call.send, status, answer.model_dump_json().encode())


async def metrics(call: Call) -> None:
    """What the server does and has done, for Prometheus."""
    if call.caller.project is not None:
        raise PermissionDeniedError("metrics are of all projects: they need a key that is for all of them")
    measurements = [*call.server.measurements(), *await call.runtime.measurements()]
    body = call.server.metrics.render(measurements)
    await send_bytes(call.send, 200, body, content_type=CONTENT_TYPE)


async def openapi(call: Call) -> None:
    """This document."""
    await send_bytes(call.send, 200, await asyncio.to_thread(call.server.openapi))


def _is_trusted(call: Call) -> bool:
    """Only who may see all projects is told of base models, which may be folders of the machine."""
    return call.caller.project is None and call.caller.may("infer")


ROUTES = [
    Route("GET", "/health", health, scope=None, response=Health),
    Route("GET", "/ready", ready, scope=None, response=Readiness),
    Route("GET", "/metrics", metrics, scope="infer", media=("text/plain",)),
    Route("GET", "/openapi.json", openapi, scope=None, response=OpenApi),
]
