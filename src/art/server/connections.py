"""HTTP connections that close when their client is too slow or sends too much. They extend uvicorn's protocol class.

    headers            complete within `read_timeout_s` and at most `MAX_HEADER_BYTES`
    body               see `bodies/body.py`; the rest of a refused body must arrive within `read_timeout_s`, and the
                       connection is closed after `MAX_DROPPED_BYTES` of it
    answer             a client that does not read is cut off after `write_timeout_s`
    between requests   closed after `KEEP_ALIVE_S`

Without these limits an attacker could hold connections open forever at no cost.

An answer whose length is known goes out in one write, head and body together, so that its client wakes up once. A
request can ask its connection what ASGI does not tell (`art.server.asgi.connection_of`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from art.config import LimitsConfig
from art.server.asgi import EXTENSION

LATE_S = 0.1
_FORWARDED = len(b"x-forwarded")
MAX_HEADER_BYTES = 64 * 2**10
"""Largest size of URL and headers together; agents send about 500 bytes."""
MAX_DROPPED_BYTES = 2**26
"""Largest part of a body that is read after its answer, without being looked at. Many clients read an answer only when
they have sent everything."""
KEEP_ALIVE_S = 75
"""Time after which an idle connection is closed. Clients can keep one during a training step."""


def connections(limits: LimitsConfig) -> type[Connection]:
    """Make the protocol class with these limits, which uvicorn takes as its setting `http`."""
    return type("Limited", (Connection,), {"limits_config": limits})


class Connection(HttpToolsProtocol):
    """One HTTP connection. Timers close it when its client sends or reads too slowly."""

    limits_config: ClassVar[LimitsConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._dropped_bytes = 0
        self._reading: asyncio.TimerHandle | None = None
        """Runs while headers are expected or incomplete, or the body of an answered request still arrives."""
        self._writing: asyncio.TimerHandle | None = None
        """Runs while the client does not read the answer."""
        self._watchers: set[Callable[[], None]] = set()
        self._proxied_app = self.app
        self._direct_app = self.app.app if isinstance(self.app, ProxyHeadersMiddleware) else self.app
        """The application without the work on headers of a proxy, for requests that have none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)
        for leave in list(self._watchers):
            leave()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # nothing is read after a refusal
            return
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._dropped_bytes = 0
        self.app = self._direct_app
        if self._reading is None:
            self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(name) > _FORWARDED and name[:_FORWARDED].lower() == b"x-forwarded":
            self.app = self._proxied_app
        self._count_header(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_reading()
        super().on_headers_complete()
        if (cycle := self.cycle) is None or cycle.scope is not self.scope:  # an upgrade, which is not served
            return
        cycle.__class__ = Cycle  # its task has not begun yet
        cycle.watchers = self._watchers  # type: ignore[attr-defined]
        self.scope["extensions"] = {EXTENSION: cycle}  # type: ignore[dict-item]
        if self.scope["http_version"] == "1.0":
            cycle.__class__ = _Unframed
            cycle.chunked_encoding, cycle.keep_alive = False, False

    def on_message_complete(self) -> None:
        self._stop_reading()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self.cycle.more_body and self._reading is None
        ):  # refused early: drop the rest of the body, for a limited time
            self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits_config.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _expect(self) -> None:
        self._reading = self.loop.call_later(self.limits_config.read_timeout_s, self._end_soon)

    def _end_soon(self) -> None:
        # If this process itself was blocked, timers can fire before data that has arrived is read.
        self._reading = self.loop.call_later(LATE_S, self.transport.abort)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"the headers are larger than {MAX_HEADER_BYTES} bytes")  # uvicorn answers 400


class Cycle(RequestResponseCycle):
    """A request and its answer. Requests find it in `scope["extensions"]`; see `art.server.asgi.connection_of`."""

    watchers: set[Callable[[], None]]
    """Functions to call when the connection ends; all requests of the connection share the set."""
    _head = b""
    """Status line and headers that wait for the body."""

    @property
    def has_whole_body(self) -> bool:
        """Whether the body of the request has arrived, so that reading it takes no time."""
        return not self.more_body

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call a function when the client hangs up; at once if it already has."""
        self.watchers.add(on_disconnect)
        self.flow.resume_reading()  # a large body has paused it, and then nobody would notice
        if self.disconnected or self.transport.is_closing():
            on_disconnect()

    async def send(self, message: Any) -> None:
        real = self.transport
        if message["type"] == "http.response.start":
            if not any(name == b"content-length" for name, _ in message.get("headers", ())):
                await super().send(message)
                return
            joined: Any = _Joined(real, b"", holds=True)
        elif self._head:
            joined = _Joined(real, self._head, holds=False)
        else:
            await super().send(message)
            return
        self.transport = joined
        try:
            await super().send(message)
            joined.end()
        finally:
            self.transport = real
        self._head = joined.data


class _Joined:
    """A transport for one message, which writes what was held before what the message writes."""

    __slots__ = ("_holds", "_real", "data")

    def __init__(self, real: Any, data: bytes, *, holds: bool) -> None:
        """With `holds`, nothing is written: it is added to `data`."""
        self._real = real
        self._holds = holds
        self.data = data

    def write(self, data: bytes) -> None:
        self.data += data
        if not self._holds:
            self._flush()

    def end(self) -> None:
        """Write what is left: the answer to a HEAD request has no body."""
        if not self._holds:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._real.close()

    def is_closing(self) -> bool:
        closing: bool = self._real.is_closing()
        return closing

    def _flush(self) -> None:
        data, self.data = self.data, b""
        if data:
            self._real.write(data)


class _Unframed(Cycle):
    """An answer to a client of HTTP/1.0, which cannot read chunks: a stream ends when the connection closes."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
