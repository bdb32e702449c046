"""The OpenAI clients of a model: one per event loop, and one for all threads of code that blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from art.client.loops import PerLoop
from art.client.openai_client import make_blocking_openai_client, make_openai_client

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from art.client.openai_client import EventHooks


class Endpoint(NamedTuple):
    """Address, API key, project and name of a model. Copies of a model may differ in any of these."""

    base_url: str
    api_key: str
    project: str
    name: str


class ModelClients:
    """Holds a model's OpenAI clients by endpoint, each made at first use. A copy begins without clients."""

    def __init__(self) -> None:
        self._by_loop: PerLoop[AsyncOpenAI] = PerLoop(lambda client: client.close())
        self._blocking: dict[Endpoint, OpenAI] = {}
        self._lock = threading.Lock()

    def get(self, endpoint: Endpoint, make_hooks: Callable[[], EventHooks]) -> AsyncOpenAI:
        """Return the asynchronous client of the running event loop for an endpoint.

        Raises:
            RuntimeError: no event loop is running.
        """
        return self._by_loop.get(
            lambda: make_openai_client(endpoint.base_url, endpoint.api_key, make_hooks()), endpoint
        )

    def get_blocking(self, endpoint: Endpoint, make_hooks: Callable[[], EventHooks]) -> OpenAI:
        """Return the client of an endpoint for code that blocks. All threads share it."""
        with self._lock:
            if endpoint not in self._blocking:
                client = make_blocking_openai_client(endpoint.base_url, endpoint.api_key, make_hooks())
                self._blocking[endpoint] = client
            return self._blocking[endpoint]

    async def close(self) -> None:
        """Close the clients of this event loop, and those for code that blocks."""
        with self._lock:
            while self._blocking:
                self._blocking.popitem()[1].close()
        await self._by_loop.close()

    def __deepcopy__(self, memo: Any) -> ModelClients:
        return ModelClients()
