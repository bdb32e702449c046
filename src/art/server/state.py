"""What one server knows of itself, beside its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from art.config import ServerConfig
from art.protocol.measurements import Measurement
from art.server.limits import Limiter
from art.server.metrics import Metrics


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
        self.is_draining = False
        """It will end soon: `/ready` says no, and all else is answered as ever."""

    def measurements(self) -> Iterator[Measurement]:
        yield Measurement("art_http_running", float(self.limiter.running))
        for limit, count in self.limiter.num_refused.items():
            yield Measurement("art_http_refused_total", float(count), {"limit": limit})
