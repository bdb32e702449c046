"""`/health`: whether the server answers at all. Without a key for all projects it tells nothing more."""

from __future__ import annotations

from typing import Any

from art.protocol.answers import Health
from art.server.call import Call, Route


async def health(call: Call) -> dict[str, Any]:
    """Whether the server answers."""
    trusted = call.caller.project is None and call.caller.may("infer")
    return await call.runtime.health() if trusted else {"status": "ok"}


ROUTES = [Route("GET", "/health", health, scope=None, response=Health)]
