"""How the light path learns what the SDK sends, and hands a request over to it: a transport below the HTTP client."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The end of a request that the light path sent: an answer or an error of aiohttp.

    It has the parts of aiohttp's session and response that the SDK's adapter uses. So the adapter makes of it what it
    makes of its own requests: the answer, or the error of its HTTP library.
    """

    error: Exception | None = None
    status: int = 0
    reason: str | None = None
    raw_headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def request(self, **_: Any) -> Self:
        return self

    async def __aenter__(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open: the body was read."""

    @property
    def content(self) -> Self:
        return self

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        yield self.body


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of `create` that goes through the SDK, seen from below its HTTP client."""

    headers: Mapping[str, str]
    """Headers that the request has because of the rollout that sends it. All attempts have the same."""
    outcome: Outcome | None = None
    """End of the first attempt, if the light path has made it."""
    answered: list[Any] = field(default_factory=list)
    """Requests (`httpx2.Request`, before version 3 of the SDK `httpx.Request`) that were sent and answered."""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[Self]:
        """Context manager: requests of the body belong to this call."""
        token = current_call.set(self)
        try:
            yield self
        finally:
            current_call.reset(token)


current_call: ContextVar[Call | None] = ContextVar("art_openai_call", default=None)


class HandoverTransport(httpx2.AsyncBaseTransport):
    """Passes requests on to the transport of aiohttp, except the first attempt of a call that the light path made."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        """The SDK's transport. Its `client` is the aiohttp session, once a request was sent."""

    async def handle_async_request(self, request: Any) -> Any:
        call = current_call.get()
        if call is None:
            return await self.inner.handle_async_request(request)
        if call.outcome is not None:
            outcome, call.outcome = call.outcome, None
            adapter = copy.copy(self.inner)
            adapter.client = lambda: outcome
            return await adapter.handle_async_request(request)
        response = await self.inner.handle_async_request(request)
        call.answered.append(request)
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()
