"""Helpers for plain ASGI: read a header, send bytes or events, notice a client that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

import orjson

from art.server.errors import ErrorBody, error_body, public_error

EXTENSION = "art"
"""Key, in the extensions of a scope, of the connection that a request came over."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client hung up, so nobody waits for an answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request's header; `None` if there is none. `name` must be in lower case."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def send_bytes(
    send: Send, status: int, body: bytes, *, content_type: bytes = b"application/json", headers: Mapping[str, str] = {}
) -> None:
    raw = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def send_events(
    send: Send,
    events: AsyncGenerator[dict[str, Any], None],
    named_error: ErrorBody | None = None,
    visible: Callable[[BaseException], BaseException] = lambda error: error,
) -> None:
    """Send server-sent events. An error before the first event is raised; a later one becomes an event.

    Args:
        named_error: makes the event of an error in a dialect whose events are named by their `type`. Without it, events
            have no names and end with `[DONE]`, as OpenAI's chat completions do.
        visible: removes from an error what the caller may not see.
    """

    async def send_event(event: dict[str, Any]) -> None:
        name = b"event: %b\n" % event["type"].encode() if named_error else b""
        body = b"%bdata: %b\n\n" % (name, orjson.dumps(event))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async with contextlib.aclosing(events):
        first = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        await send_event(first)
        try:
            async for event in events:
                await send_event(event)
        except Exception as error:
            await send_event((named_error or error_body)(public_error(visible(error))))
        await send({"type": "http.response.body", "body": b"" if named_error else b"data: [DONE]\n\n"})


class Connection(Protocol):
    """What the connections of `art-server` tell beyond ASGI; see `art.server.connections`."""

    @property
    def has_whole_body(self) -> bool: ...

    watchers: set[Callable[[], None]]

    def watch(self, on_disconnect: Callable[[], None]) -> None: ...


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; `None` where another server than `art-server` runs the application."""
    extensions = scope.get("extensions")
    return None if extensions is None else extensions.get(EXTENSION)


class _CancelOnDisconnect:
    """Context manager: cancel its body when the client hangs up, and then raise `ClientDisconnected`.

    Enter it only after the request body has been read.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection = connection_of(scope)
        self._receive = receive
        self._is_gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._connection is None:
            self._watcher = asyncio.create_task(self._watch())
        else:
            self._connection.watch(self._cancel)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if self._connection is not None:
            self._connection.watchers.discard(self._cancel)
        elif self._watcher is not None:
            self._watcher.cancel()
        if self._is_gone and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientDisconnected from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self._is_gone = True
        self._task.cancel()


cancel_on_disconnect = _CancelOnDisconnect
