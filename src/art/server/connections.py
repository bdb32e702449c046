"""HTTP connections that close when their client is too slow or sends too much. They extend uvicorn's protocol class.

    headers            complete within `READ_TIMEOUT_S` and at most `MAX_HEADER_BYTES`
    body               see `body.py`; the rest of a refused body must arrive within `READ_TIMEOUT_S`, and the
                       connection is closed after `MAX_DROPPED_BYTES` of it
    answer             a client that does not read is cut off after `WRITE_TIMEOUT_S`
    between requests   closed after `KEEP_ALIVE_S`

Without these limits an attacker could hold connections open forever at no cost.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

READ_TIMEOUT_S = 30.0
"""Seconds that a client has to send its headers."""
WRITE_TIMEOUT_S = 60.0
"""Seconds after which a client that reads nothing of its answer is disconnected."""
LATE_S = 0.1
MAX_HEADER_BYTES = 64 * 2**10
"""Largest size of URL and headers together; agents send about 500 bytes."""
MAX_DROPPED_BYTES = 2**26
"""Largest part of a body that is read after its answer, without being looked at. Many clients read an answer only when
they have sent everything."""
KEEP_ALIVE_S = 75
"""Time after which an idle connection is closed. Clients can keep one during a training step."""


class Connection(HttpToolsProtocol):
    """One HTTP connection. Timers close it when its client sends or reads too slowly."""

    read_timeout_s: ClassVar[float] = READ_TIMEOUT_S
    write_timeout_s: ClassVar[float] = WRITE_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._dropped_bytes = 0
        self._reading: asyncio.TimerHandle | None = None
        """Runs while headers are expected or incomplete, or the body of an answered request still arrives."""
        self._writing: asyncio.TimerHandle | None = None
        """Runs while the client does not read the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

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
        if self._reading is None:
            self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_header(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_reading()
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is None or cycle.scope is not self.scope:  # an upgrade, which is not served
            return
        cycle.__class__ = _Cycle  # its task has not begun yet
        if self.scope["http_version"] == "1.0":
            cycle.__class__ = _Unframed
            cycle.chunked_encoding, cycle.keep_alive = False, False

    def on_message_complete(self) -> None:
        self._stop_reading()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and self._reading is None:  # refused early: the rest is dropped, for a limited time
            self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.write_timeout_s, self.transport.abort)

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
        def end_soon() -> None:
            # If this process itself was blocked, timers can fire before data that has arrived is read.
            self._reading = self.loop.call_later(LATE_S, self.transport.abort)

        self._reading = self.loop.call_later(self.read_timeout_s, end_soon)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"the headers are larger than {MAX_HEADER_BYTES} bytes")  # uvicorn answers 400


class _Cycle(RequestResponseCycle):
    """An answer whose length is known goes out in one write, head and body together: its client wakes up once.

    Without it a chat costs a tenth more CPU.
    """

    _held: _Held | None = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if any(name == b"content-length" for name, _ in message.get("headers", ())):
                self._held = _Held(self.transport)
                self.transport = cast("asyncio.Transport", self._held)
            await super().send(message)
            return
        try:
            await super().send(message)
        finally:
            if (held := self._held) is not None:
                self._held, self.transport = None, held.real
                held.flush()


class _Held:
    """A transport that keeps what is written until it is flushed."""

    def __init__(self, real: asyncio.Transport) -> None:
        self.real = real
        self._data: list[bytes] = []
        self._closes = False
        self.write = self._data.append

    def close(self) -> None:
        self._closes = True

    def is_closing(self) -> bool:
        return self._closes or self.real.is_closing()

    def flush(self) -> None:
        self.real.write(b"".join(self._data))
        if self._closes:
            self.real.close()


class _Unframed(_Cycle):
    """An answer to a client of HTTP/1.0, which cannot read chunks: a stream ends when the connection closes."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
