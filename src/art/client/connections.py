"""The OpenAI clients of a model: one for each event loop and address."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from art.client.http import EventHooks, Hooks, PerLoop
from art.config.base import check_no_userinfo
from art.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def load_openai() -> None:
    """Import what the first request needs, which takes half a second, so that it does not delay the first rollouts."""
    importlib.import_module("art.client.openai_client")
    if importlib.util.find_spec("aiohttp") is not None:
        importlib.import_module("aiohttp")


class ModelAddress(NamedTuple):
    """Address, API key, project and name of a model. Copies of a model may differ in any of these."""

    base_url: str
    api_key: str
    model: str
    """`project/name` of the model, whose rollouts add headers to their requests."""
    logprobs: bool = False
    """Whether each chat request asks for log-probs, unless it says something else itself."""


def check_address(base_url: str) -> str:
    """Return the address if requests can be sent there.

    Raises:
        ConfigError: it is not an http address. OpenAI's client would retry it again and again.
    """
    check_no_userinfo(base_url, "inference_base_url")
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"inference_base_url must be an address like http://host:8000/v1, got {base_url!r}",
            param="inference_base_url",
        )
    return base_url


class ModelClients:
    """Holds a model's OpenAI clients by address, each made at first use. A copy begins without clients."""

    def __init__(self) -> None:
        self._by_loop: PerLoop[AsyncOpenAI] = PerLoop(lambda client: client.close())
        self._blocking: dict[ModelAddress, OpenAI] = {}
        self._lock = threading.Lock()

    def get(self, address: ModelAddress, make_hooks: Callable[[], Hooks]) -> AsyncOpenAI:
        """Return the asynchronous client of the running event loop for an address.

        Raises:
            RuntimeError: no event loop is running.
        """
        from art.client.openai_client import make_openai_client

        base_url, api_key, model, logprobs = address
        return self._by_loop.get(
            lambda: make_openai_client(base_url, api_key, make_hooks(), model, logprobs=logprobs), address
        )

    def get_blocking(self, address: ModelAddress, make_hooks: Callable[[], EventHooks]) -> OpenAI:
        """Return the client of an address for code that blocks. All threads share it."""
        from art.client.openai_client import make_blocking_openai_client

        base_url, api_key, model, logprobs = address
        with self._lock:
            if address not in self._blocking:
                client = make_blocking_openai_client(base_url, api_key, make_hooks(), model, logprobs=logprobs)
                self._blocking[address] = client
            return self._blocking[address]

    async def close(self) -> None:
        """Close the clients of this event loop, and those for code that blocks."""
        with self._lock:
            while self._blocking:
                self._blocking.popitem()[1].close()
        await self._by_loop.close()

    def __deepcopy__(self, memo: Any) -> ModelClients:
        return ModelClients()
