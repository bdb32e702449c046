"""Answers of the server: JSON, server-sent events, work that ends when its client hangs up, and errors: one table from
error class to status, and OpenAI's error body."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from art import errors
from art.gateway.workers import INLINE, json_pieces
from art.protocol.chat_completions import invalid_request

logger = logging.getLogger(__name__)

STATUS: dict[type[errors.ArtError], int] = {
    errors.ConfigError: 400,
    errors.RequestError: 400,
    errors.AuthenticationError: 401,
    errors.PermissionDeniedError: 403,
    errors.NotFoundError: 404,
    errors.ConflictError: 409,
    errors.RequestTimeoutError: 408,
    errors.PayloadTooLargeError: 413,
    errors.UnsupportedMediaError: 415,
    errors.OverloadedError: 429,
    errors.QuotaError: 429,
    errors.TrajectoryError: 422,
    errors.TrainingError: 500,
    errors.JobCancelledError: 409,
    errors.PublishError: 500,
    errors.StorageError: 500,
    errors.DiskFullError: 507,
    errors.KeysUnavailableError: 503,
    errors.DirectoryGoneError: 503,
    errors.ProcessError: 503,
    errors.MachineError: 502,
    errors.UnreachableError: 503,
    errors.ArtError: 500,
}
"""The nearest base class in this table decides the status of an error. Clients turn the `code` in the body back into
the class, with `art.errors.error_from_code`."""

METHOD_NOT_ALLOWED = 405

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's `type` of an error by its status. Others are "invalid_request_error" or, from 500 on, "server_error"."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that is being answered. The log has internal errors under it."""
ErrorBody = Callable[[errors.ArtError], dict[str, Any]]
"""Function that makes the JSON body of an error."""


def public_error(error: BaseException) -> errors.ArtError:
    """Return the error that a client may see. An error from outside ART shows only an id, under which it is logged."""
    if isinstance(error, ValidationError):
        return invalid_request(error)
    if getattr(error, "errno", getattr(error.__cause__, "errno", None)) in (errno.EMFILE, errno.ENFILE):
        logger.error("no file can be opened: %s. Raise the limit of open files (`ulimit -n`, LimitNOFILE)", error)
        return errors.ProcessError("the server has too many open files now; repeat the request in a moment")
    if isinstance(error, errors.ArtError):
        return error
    error_id = REQUEST_ID.get() or os.urandom(6).hex()
    logger.error("error %s", error_id, exc_info=error)
    return errors.ArtError(f"internal error {error_id}; the server's log has the details under this id")


def failure(error: BaseException, body: ErrorBody | None = None) -> Response:
    """Make the HTTP answer to an error. By default its body has OpenAI's form."""
    error = public_error(error)
    # Without this header the OpenAI client silently retries 409 and every 5xx for minutes.
    headers = {"x-should-retry": "true" if error.transient else "false"}
    if isinstance(error, errors.OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.RequestTimeoutError):
        headers["connection"] = "close"  # the rest of the body may still arrive
    return Response(orjson.dumps((body or error_body)(error)), _status(error), headers, "application/json")


def error_body(error: errors.ArtError) -> dict[str, Any]:
    """Make the JSON body of an error in OpenAI's form."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _status(error: errors.ArtError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


# -- what is no error --

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
