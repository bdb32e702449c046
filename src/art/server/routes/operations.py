"""Routes for operators: health, readiness, metrics, and the OpenAPI document."""

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
    """Return status `ok` if the server answers at all, and details for a key for all projects."""
    return await call.runtime.health() if _is_trusted(call) else {"status": "ok"}


async def ready(call: Call) -> None:
    """Return whether the server is ready for work; HTTP status 503 if not."""
    if call.server.is_draining:
        obstacles = {"server": "it is shutting down"}
    else:
        obstacles = await call.server.obstacles(call.runtime.obstacles)
    answer = Readiness(ready=not obstacles, obstacles=obstacles if _is_trusted(call) else {})
    status = 200 if answer.ready else NOT_READY
    await send_bytes(call.send, status, call.without_paths(answer.model_dump_json().encode()))


async def metrics(call: Call) -> None:
    """Return current numbers and totals in the text format of Prometheus."""
    if call.caller.project is not None:
        raise PermissionDeniedError("metrics cover all projects; use a key that is not limited to one project")
    measurements = [*call.server.measurements(), *await call.runtime.measurements()]
    body = call.server.metrics.render(measurements)
    await send_bytes(call.send, 200, body, content_type=CONTENT_TYPE)


async def openapi(call: Call) -> None:
    """Return this OpenAPI document."""
    await send_bytes(call.send, 200, await asyncio.to_thread(call.server.openapi))


def _is_trusted(call: Call) -> bool:
    """Whether the caller may see details such as base models, which can be folders of the machine: only keys for all
    projects may."""
    return call.caller.project is None and call.caller.may("infer")


ROUTES = [
    Route("GET", "/health", health, scope=None, response=Health),
    Route("GET", "/ready", ready, scope=None, response=Readiness),
    Route("GET", "/metrics", metrics, scope="infer", media=("text/plain",)),
    Route("GET", "/openapi.json", openapi, scope=None, response=OpenApi),
]
