"""OpenAI clients for agents: patient with a server that restarts, and cheap per request."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from art.client.http import LOOPBACK
from art.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from openai import AsyncOpenAI, OpenAI

    EventHooks = Mapping[str, list[Callable[..., Any]]]

TIMEOUT_S = 1200.0
CONNECT_TIMEOUT_S = 5.0
MAX_RETRIES = 30
"""Retries of a request. With the back-off of OpenAI's client, from 0.5 s to 8 s, they last about 3.5 minutes."""
MAX_CONNECTIONS = 10_000


def load_openai() -> None:
    """Import what the first request needs, which takes half a second, so that it does not delay the first rollouts."""
    for name in ("openai.resources.chat.completions", "aiohttp"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def make_openai_client(base_url: str, api_key: str, event_hooks: EventHooks | None = None) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` for many concurrent requests. Use it in one event loop only, and close it there.

    If aiohttp is installed, requests are sent through it, which takes about half the CPU time.

    Args:
        event_hooks: hooks of the HTTP client, called with each request before it is sent and with each response before
            it is read.
    """
    import openai

    # Before version 3, which litellm does not support yet, openai needs a separate adapter for aiohttp.
    adapter = "aiohttp" if int(openai.__version__.partition(".")[0]) >= 3 else "httpx_aiohttp"
    has_aiohttp = importlib.util.find_spec(adapter) is not None
    make_http = openai.DefaultAioHttpClient if has_aiohttp else openai.DefaultAsyncHttpxClient
    return openai.AsyncOpenAI(**_options(base_url, api_key, event_hooks, make_http))


def make_blocking_openai_client(base_url: str, api_key: str, event_hooks: EventHooks | None = None) -> OpenAI:
    """Make an `OpenAI` client for code that blocks. Several threads may use it; the caller closes it."""
    import openai

    return openai.OpenAI(**_options(base_url, api_key, event_hooks, openai.DefaultHttpxClient))


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
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"inference_base_url must be an address like http://host:8000/v1, got {base_url!r}",
            param="inference_base_url",
        )
    return base_url
