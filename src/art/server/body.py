"""Read the body of a request within limits, which are checked while it arrives: size, values, depth, time.

bytes --> counted by `JsonBounds` --> bytes of JSON --workers--> values

Nothing is built before the whole body is within its limits. A large body is decoded in a thread, and one above 1 MiB in
a process, as the event loop answers everybody else meanwhile.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from art.config import ServerConfig
from art.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    ProcessError,
    RequestTimeoutError,
    UnsupportedMediaError,
)
from art.gateway.workers import Workers
from art.protocol.chat import JsonBounds
from art.server.body_decoder import decode_apart
from art.server.connections import READ_TIMEOUT_S

T = TypeVar("T")

MAX_CHAT_BYTES = 8 * 2**20
"""Largest body of a request without training data. A conversation of a million tokens has about half of it."""
MAX_VALUES, MAX_TRAINING_VALUES = 100_000, 2_000_000
"""Values in the body of a request: numbers, texts, lists and objects. A conversation has about ten per message."""
MAX_DEPTH = 64
"""Depth of nested lists and objects."""
LARGE_BYTES = 2**20
"""A body above this size is decoded in a process of its own."""
MIN_BYTES_PER_S = 16 * 2**10
"""Slowest rate at which a body may arrive after the first `READ_TIMEOUT_S`. A phone's network is ten times as fast."""
_BOM = b"\xef\xbb\xbf"
"""The byte order mark that some programs on Windows put before JSON."""


async def read_json(
    request: Request, config: ServerConfig, workers: Workers, convert: Callable[[Any], T], *, training_data: bool
) -> T:
    """Read and decode the body, and return what `convert` makes of it. Both happen in a thread if the body is large.

    Args:
        training_data: whether it holds trajectories, for which the limits are higher.

    Raises:
        PayloadTooLargeError: the body is larger than the limit, by its declared length or as it arrives.
        UnsupportedMediaError: the body is compressed.
        RequestTimeoutError: the body arrives too slowly.
        InvalidRequestError: the body is not JSON, has too many values or too long a text, or is nested too deeply.
        ProcessError: a large body's decoder died.
        ClientDisconnect: the client hung up before the end of the body.
    """
    max_bytes, max_values = min(config.max_body_bytes, MAX_CHAT_BYTES), MAX_VALUES
    if training_data:
        max_bytes, max_values = config.max_body_bytes, MAX_TRAINING_VALUES
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaError(f"the request body has the content encoding {encoding[:40]!r}; send it plain")
    too_large = PayloadTooLargeError(
        f"the request body is larger than {max_bytes} bytes; send less. `max_body_bytes` of the server is for "
        f"training calls; every other request has at most {MAX_CHAT_BYTES}"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body, more = bytearray(), True
    bounds = JsonBounds(max_values=max_values, max_depth=MAX_DEPTH, what="the request body")
    deadline = asyncio.get_running_loop().time() + READ_TIMEOUT_S
    while more:
        try:
            async with asyncio.timeout_at(deadline + len(body) / MIN_BYTES_PER_S):
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeoutError(f"the request body arrived too slowly: {len(body)} bytes came in time") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(part) > max_bytes:
            raise too_large
        bounds.feed(part)
        body += part
    return await workers.run(len(body), _decode, body, convert)


def _decode(body: bytearray, convert: Callable[[Any], T]) -> T:
    if body.startswith(_BOM):
        del body[: len(_BOM)]
    try:
        value = decode_apart(body) if len(body) > LARGE_BYTES else orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    except ValueError as error:
        raise InvalidRequestError(f"the request body has {error}") from None
    except subprocess.CalledProcessError as error:
        raise ProcessError(
            f"the process that decodes the request body died ({error.returncode}), perhaps for want of memory; send "
            "the request again"
        ) from None
    body.clear()  # its memory is free before the values are checked and copied
    return convert(value)
