"""The state of the HTTP server that does not belong to the runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from art.config import ServerConfig
from art.errors import StorageError
from art.gateway.workers import Workers
from art.protocol.answers import Measurement
from art.server.auth import Keyring
from art.server.limits import Limiter
from art.server.metrics import Metrics
from art.server.page.sessions import PageState
from art.server.paths import HiddenPaths

READY_EVERY_S = 1.0


class ServerState:
    """State of the HTTP server that all requests share: limits, metrics, readiness."""

    def __init__(
        self,
        config: ServerConfig,
        openapi: Callable[[], bytes],
        paths: HiddenPaths,
        keyring: Keyring,
        page: PageState,
    ) -> None:
        """
        Args:
            openapi: makes the OpenAPI document. It is called only when somebody asks, because that takes a moment.
            paths: removes folders of the machine from what keys without scope `admin` see.
            keyring: all valid keys.
            page: what the routes of the page share.
        """
        self.keyring = keyring
        self.page = page
        self.config = config
        self.paths = paths
        self.openapi = openapi
        self.limiter = Limiter(config.limits)
        self.workers = Workers()
        """Decode large bodies."""
        self.metrics = Metrics()
        self._finding = asyncio.Lock()
        self._obstacles: dict[str, str] = {}
        self._found_at = float("-inf")
        self.is_draining = False
        """Whether the server will end soon. `/ready` then says no; everything else is answered as usual."""

    async def obstacles(self, find: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
        """Return what keeps the server from working, as `find` reports it. `find` runs at most every `READY_EVERY_S`,
        because it writes to the disk and `/ready` needs no key."""
        async with self._finding:
            now = time.monotonic()
            if now - self._found_at >= READY_EVERY_S:
                self._obstacles, self._found_at = await find() | await self._key_obstacle(), now
            return self._obstacles

    async def _key_obstacle(self) -> dict[str, str]:
        try:
            await asyncio.to_thread(self.keyring.check)
        except StorageError as error:
            return {"keys": error.message}
        return {}

    def measurements(self) -> Iterator[Measurement]:
        yield Measurement("art_http_running", float(self.limiter.running))
        for limit, count in self.limiter.num_refused.items():
            yield Measurement("art_http_refused_total", float(count), {"limit": limit})
