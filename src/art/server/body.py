"""Read the body of a request within limits, which are checked while it arrives: size, values, depth, time.

bytes --gzip?--> counted by `JsonBounds` --> bytes of JSON --workers--> values

Nothing is built before the whole body is within its limits. A large body is decoded in a thread, and one above 1 MiB in
a process, as the event loop answers everybody else meanwhile.
"""

from __future__ import annotations

import asyncio
import subprocess
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
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
from art.protocol.dialects.json_bounds import JsonBounds
from art.server.body_decoder import decode_apart

T = TypeVar("T")

LARGE_BYTES = 2**20
"""A body above this size is decoded in a process of its own."""
MIN_BYTES_PER_S = 16 * 2**10
"""Slowest rate at which a body may arrive. A phone's network is ten times as fast."""
MAX_GZIP_RATIO = 100
"""Largest size of a decompressed body relative to what came. Conversations that repeat themselves reach 30."""
_FREE_BYTES = 2**20
"""Decompressed bytes for which the ratio is not looked at."""
_GZIP_STEP = 2**18
"""Bytes that are decompressed in one go."""
_GZIP = zlib.MAX_WBITS | 16
_BOM = b"\xef\xbb\xbf"
"""The byte order mark that some programs on Windows put before JSON."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on the body of one kind of request."""

    max_bytes: int
    setting: str
    """The setting of the server that `max_bytes` comes from, for errors."""
    max_values: int
    max_depth: int
    timeout_s: float

    @classmethod
    def of(cls, config: ServerConfig, *, training_data: bool) -> BodyLimits:
        limits = config.limits
        max_values = limits.max_training_json_values if training_data else limits.max_json_values
        setting, max_bytes = "max_body_bytes", config.max_body_bytes
        if not training_data and config.max_chat_body_bytes < max_bytes:
            setting, max_bytes = "max_chat_body_bytes", config.max_chat_body_bytes
        return cls(max_bytes, setting, max_values, limits.max_json_depth, limits.read_timeout_s)


async def read_json(request: Request, limits: BodyLimits, workers: Workers, convert: Callable[[Any], T]) -> T:
    """Read and decode the body, and return what `convert` makes of it. Both happen in a thread if the body is large.

    Raises:
        PayloadTooLargeError: the body is larger than the limit, by its declared length or as it arrives.
        UnsupportedMediaError: the body is compressed in another way than gzip.
        RequestTimeoutError: the body arrives too slowly.
        InvalidRequestError: the body is not JSON, has too many values or too long a text, or is nested too deeply.
        ProcessError: a large body's decoder died.
        ClientDisconnect: the client hung up before the end of the body.
    """
    body = bytearray()
    bounds = JsonBounds(max_values=limits.max_values, max_depth=limits.max_depth, what="the request body")
    async for part in _parts(request, limits):
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


async def _parts(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    """The decompressed body, as it arrives."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        async for part in _received(request, limits):
            yield part
        return
    if encoding not in ("gzip", "x-gzip"):
        raise UnsupportedMediaError(
            f"the request body has the content encoding {encoding[:40]!r}; send it plain, or compressed with gzip"
        )
    gzip, arrived = _Gzip(limits), 0
    async for part in _received(request, limits):
        arrived += len(part)
        for plain in gzip.decompress(part, arrived):
            yield plain
            await asyncio.sleep(0)
    gzip.check_end()


class _Gzip:
    """Decompresses one body in small steps, within its limits."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._zlib = zlib.decompressobj(_GZIP)
        self._size = 0

    def decompress(self, part: bytes, arrived: int) -> Iterator[bytes]:
        """Yield what the next part of the gzip holds. `arrived` is the size of all parts so far."""
        more = bool(part)
        while more:
            try:
                plain = self._zlib.decompress(part, _GZIP_STEP)
            except zlib.error as error:
                raise InvalidRequestError(f"the request body is not valid gzip: {error}") from None
            if self._zlib.unused_data:
                raise InvalidRequestError("the request body has more after the end of its gzip; send one gzip")
            part = self._zlib.unconsumed_tail
            more = bool(part) or len(plain) == _GZIP_STEP
            self._size += len(plain)
            if self._size > self._limits.max_bytes:
                raise _too_large(self._limits)
            if self._size > max(_FREE_BYTES, arrived * MAX_GZIP_RATIO):
                raise PayloadTooLargeError(
                    f"the request body is more than {MAX_GZIP_RATIO} times as large as its gzip; send it plain"
                )
            yield plain

    def check_end(self) -> None:
        if not self._zlib.eof:
            raise InvalidRequestError("the request body is not valid gzip: its end is missing")


async def _received(request: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise _too_large(limits)
    size, deadline = 0, asyncio.get_running_loop().time() + limits.timeout_s
    more = True
    while more:
        try:
            async with asyncio.timeout_at(deadline + size / MIN_BYTES_PER_S):
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeoutError(f"the request body arrived too slowly: {size} bytes came in time") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limits.max_bytes:
            raise _too_large(limits)
        yield part


def _too_large(limits: BodyLimits) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the request body is larger than {limits.max_bytes} bytes; send less, or raise `{limits.setting}` of the "
        "server"
    )
