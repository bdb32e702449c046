"""Helpers for plain ASGI: read a body within limits, send bytes or events, notice a client that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from art.config import ServerConfig
from art.errors import InvalidRequestError, PayloadTooLargeError, RequestTimeoutError
from art.server.errors import ErrorBody, error_body, public_error

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client hung up, so nobody waits for an answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request's header; `None` if there is none. `name` must be in lower case."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


MIN_BYTES_PER_S = 16 * 2**10
"""Slowest rate at which a body may arrive. A phone's network is ten times as fast."""


async def read_json(scope: Scope, receive: Receive, config: ServerConfig) -> Any:
    """Read the body of a request and decode it as JSON.

    Raises:
        PayloadTooLargeError: the body is larger than the limit, by its declared length or as it arrives.
        RequestTimeoutError: the body arrives too slowly.
        InvalidRequestError: the body is not JSON, or nested too deeply.
        ClientDisconnected: the client hung up before the end of the body.
    """
    body = await read_body(scope, receive, config.max_body_bytes, config.limits.read_timeout_s)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    _check_depth(value, config.limits.max_json_depth)
    return value


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Read the raw body of a request. The errors are those of `read_json`, except for those of JSON."""
    declared = header(scope, b"content-length") or "0"
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    deadline = asyncio.get_running_loop().time() + timeout_s
    while more:
        try:
            async with asyncio.timeout_at(deadline + size / MIN_BYTES_PER_S):
                message = await receive()
        except TimeoutError:
            raise RequestTimeoutError(f"the request body arrived too slowly: {size} bytes came in time") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_depth(value: Any, limit: int) -> None:
    """Refuse a value with more than `limit` nested levels. A loop does it, as recursion could exhaust the stack."""
    level: list[Any] = [[value]]
    depth = -1
    while level := [
        item
        for container in level
        for item in (container.values() if type(container) is dict else container)
        if type(item) is dict or type(item) is list
    ]:
        depth += 1
        if depth >= limit:
            raise InvalidRequestError(f"the request body has more than {limit} lists and objects inside one another")


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the request body is larger than {max_bytes} bytes; send less, or raise `max_body_bytes` of the server"
    )


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


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Context manager: cancel its body when the client hangs up, and then raise `ClientDisconnected`.

    Enter it only after the request body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()
