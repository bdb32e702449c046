"""`/health`: whether the server answers at all. Needs no key and tells nothing private."""

from __future__ import annotations

from typing import Any

from art.server.call import Call, Route


async def health(call: Call) -> dict[str, Any]:
    return await call.runtime.health()


ROUTES = [Route("GET", "/health", health, open=True)]
