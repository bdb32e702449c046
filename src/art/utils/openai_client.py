"""The OpenAI client that agents are given: patient with a server that restarts, and cheap per request."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TIMEOUT_S = 1200.0
CONNECT_TIMEOUT_S = 5.0
MAX_RETRIES = 30
"""With the client's own back-off of 0.5 s doubling to 8 s this outlasts about three and a half minutes."""
MAX_CONNECTIONS = 10_000
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def load_openai() -> None:
    """Import what a first request needs: half a second that would otherwise hold up the first rollouts."""
    for name in ("openai.resources.chat.completions", "aiohttp"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def make_openai_client(base_url: str, api_key: str) -> AsyncOpenAI:
    """An `AsyncOpenAI` for many concurrent requests. To be used in one event loop only, and closed in it.

    With aiohttp installed it sends through that, which takes about half the CPU time per request.
    """
    import httpx2
    import openai

    # Before version 3, which litellm does not take yet, openai needs an adapter of its own for aiohttp.
    adapter = "aiohttp" if int(openai.__version__.partition(".")[0]) >= 3 else "httpx_aiohttp"
    has_aiohttp = importlib.util.find_spec(adapter) is not None
    http_client = (openai.DefaultAioHttpClient if has_aiohttp else openai.DefaultAsyncHttpxClient)(
        timeout=openai.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        trust_env=urlsplit(base_url).hostname not in _LOOPBACK,  # a proxy cannot reach this machine's loopback
    )
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        timeout=openai.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        max_retries=MAX_RETRIES,
        http_client=http_client,
    )
