"""What one server knows of itself, beside its runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from art.config import ServerConfig
from art.protocol.answers import Measurement
from art.server.limits import Limiter
from art.server.prometheus import Metrics

READY_EVERY_S = 1.0


class ServerState:
    """Shared by all requests."""

    def __init__(self, config: ServerConfig, openapi: Callable[[], bytes]) -> None:
        """
        Args:
            openapi: makes the OpenAPI document, which takes a moment and is seldom wanted.
        """
        self.config = config
        self.openapi = openapi
        self.limiter = Limiter(config.limits)
        self.metrics = Metrics()
        self._finding = asyncio.Lock()
        self._obstacles: dict[str, str] = {}
        self._found_at = float("-inf")
        self.is_draining = False
        """It will end soon: `/ready` says no, and all else is answered as ever."""

    async def obstacles(self, find: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
        """What `find` found, at most `READY_EVERY_S` ago: who needs no key must not cause a write each time."""
        async with self._finding:
            now = time.monotonic()
            if now - self._found_at >= READY_EVERY_S:
                self._obstacles, self._found_at = await find(), now
            return self._obstacles

    def measurements(self) -> Iterator[Measurement]:
        yield Measurement("art_http_running", float(self.limiter.running))
        for limit, count in self.limiter.num_refused.items():
            yield Measurement("art_http_refused_total", float(count), {"limit": limit})
