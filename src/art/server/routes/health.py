"""`/health`: whether the server answers at all. Without the key it tells nothing more."""

from __future__ import annotations

from typing import Any

from art.server.call import Call, Route


async def health(call: Call) -> dict[str, Any]:
    return await call.runtime.health() if call.trusted else {"status": "ok"}


ROUTES = [Route("GET", "/health", health, open=True)]
