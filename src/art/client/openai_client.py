"""OpenAI clients for agents: patient with a server that restarts, cheap per request, one per model and event loop."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from art.client.connections import LOOPBACK, EventHooks, Hooks, PerLoop
from art.config.base import check_no_userinfo
from art.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

TIMEOUT_S = 1200.0
CONNECT_TIMEOUT_S = 5.0
MAX_RETRIES = 30
"""Retries of a request. With the back-off of OpenAI's client, from 0.5 s to 8 s, they last about 3.5 minutes."""
MAX_CONNECTIONS = 10_000
STOCK_CLIENT = "ART_STOCK_CLIENT"
"""Environment variable: with `1`, all requests of `openai_client()` go through OpenAI's client."""


def load_openai() -> None:
    """Import what the first request needs, which takes half a second, so that it does not delay the first rollouts."""
    importlib.import_module("art.client.sdk_clients")
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


def make_openai_client(
    base_url: str, api_key: str, hooks: Hooks | None = None, model: str = "", *, logprobs: bool = False
) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` for many concurrent requests. Use it in one event loop only, and close it there.

    If aiohttp is installed, requests are sent through it, which takes about half the CPU time. With orjson too, plain
    chat requests take the light path (`art/client/sdk_clients.py`), which takes an eighth of that.

    Args:
        hooks: hooks of the HTTP client.
        model, logprobs: as in `ModelAddress`.

    Raises:
        ConfigError: `ART_STOCK_CLIENT` is neither 0 nor 1.
    """
    import openai

    from art.client.sdk_clients import AsyncOpenAI, add_handover

    if (stock := os.environ.get(STOCK_CLIENT, "")) not in ("", "0", "1"):
        raise ConfigError(f"{STOCK_CLIENT} must be 1 (only OpenAI's client) or 0 (the default), got {stock!r}")
    hooks = hooks or Hooks({"request": [], "response": []}, lambda: False)
    # Before version 3, which litellm does not support yet, openai needs a separate adapter for aiohttp.
    adapter = "aiohttp" if int(openai.__version__.partition(".")[0]) >= 3 else "httpx_aiohttp"
    has_aiohttp = importlib.util.find_spec(adapter) is not None
    make_http = openai.DefaultAioHttpClient if has_aiohttp else openai.DefaultAsyncHttpxClient
    options = _options(base_url, api_key, hooks.by_event, make_http)
    client = AsyncOpenAI(**options)
    client.asked_model, client.asks_logprobs = model, logprobs
    if has_aiohttp and not logprobs and stock != "1" and importlib.util.find_spec("orjson") is not None:
        add_handover(options["http_client"])
        client.hooks = hooks
    return client


def make_blocking_openai_client(
    base_url: str, api_key: str, event_hooks: EventHooks | None = None, model: str = "", *, logprobs: bool = False
) -> OpenAI:
    """Make an `OpenAI` client for code that blocks. Several threads may use it; the caller closes it."""
    import openai

    from art.client.sdk_clients import OpenAI

    client = OpenAI(**_options(base_url, api_key, event_hooks, openai.DefaultHttpxClient))
    client.asked_model, client.asks_logprobs = model, logprobs
    return client


def _options(
    base_url: str, api_key: str, event_hooks: EventHooks | None, make_http: Callable[..., Any]
) -> dict[str, Any]:
    import httpx2
    import openai

    timeout = openai.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    http_client = make_http(
        timeout=timeout,
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # a proxy cannot reach this machine's loopback
        event_hooks=event_hooks,
    )
    return {
        "base_url": base_url, "api_key": api_key, "timeout": timeout, "max_retries": MAX_RETRIES,
        "http_client": http_client,
    }  # fmt: skip


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
        base_url, api_key, model, logprobs = address
        return self._by_loop.get(
            lambda: make_openai_client(base_url, api_key, make_hooks(), model, logprobs=logprobs), address
        )

    def get_blocking(self, address: ModelAddress, make_hooks: Callable[[], EventHooks]) -> OpenAI:
        """Return the client of an address for code that blocks. All threads share it."""
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
