"""Answers beyond a plain JSON body: server-sent events, and work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from art.gateway.json_pieces import json_pieces
from art.gateway.workers import INLINE
from art.server.errors import ErrorBody, error_body, public_error

UNBUFFERED = {"x-accel-buffering": "no"}
"""Header without which a proxy such as nginx holds events back to send many at once."""


class EventStream(StreamingResponse):
    """Server-sent events. Their generator is closed when the last one is sent, or when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] = {}) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", **headers})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async def send_one(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # also a source that never waits is ended when the client has hung up

        await super().stream_response(send_one)


async def stream_events(
    events: AsyncGenerator[dict[str, Any], None],
    named_error: ErrorBody | None = None,
    visible: Callable[[BaseException], BaseException] = lambda error: error,
) -> EventStream:
    """Make an answer of events. An error before the first event is raised; a later one becomes an event.

    Args:
        named_error: makes the event of an error in a dialect whose events are named by their `type`. Without it, events
            have no names and end with `[DONE]`, as OpenAI's chat completions do.
        visible: removes from an error what the caller may not see.
    """

    def frame(event: dict[str, Any]) -> bytes:
        name = b"event: %b\n" % event["type"].encode() if named_error else b""
        return b"%bdata: %b\n\n" % (name, orjson.dumps(event))

    async def frames() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(events):
            yield frame(first)
            try:
                async for event in events:
                    yield frame(event)
            except Exception as error:
                yield frame((named_error or error_body)(public_error(visible(error))))
            if not named_error:
                yield b"data: [DONE]\n\n"

    first = await anext(events)
    return EventStream(frames())


@contextlib.asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Context manager: cancel its body when the client hangs up, and then raise `ClientDisconnect`.

    Enter it only after the request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


async def encode_json(answer: Any) -> bytes:
    """Encode an answer. Between parts of a large one, others are answered."""
    if isinstance(answer, dict) and not any(isinstance(one, list) and len(one) > 1 for one in answer.values()):
        return orjson.dumps(answer)  # one choice, which would be one piece
    body, size = bytearray(), 0
    for piece in json_pieces(answer, 2):
        body += piece
        if len(body) - size > INLINE:
            size = len(body)
            await asyncio.sleep(0)
    return bytes(body)
