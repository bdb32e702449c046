"""Frames between the server and its engine and trainer processes, over an inherited socket pair or, to another machine,
over TCP with TLS (`art.worker.door`).

A frame is a 4-byte big-endian length, then that many bytes of JSON:

    encode_frame({"cancel": 7})  -->  b"\\x00\\x00\\x00\\x0c" b'{"cancel":7}'

The messages are:

    request    {"id": 7, "method": "generate", "params": {...}}
    answers    {"id": 7, "result": {...}}                  any number, then one with "last": true
    failure    {"id": 7, "error": {"code": "...", "message": "..."}, "last": true}
    cancel     {"cancel": 7}
    heartbeat  {"id": 0, "result": {...}}                  from the child, about once a second
    control    {"worker": "signal", ...}                   to and from the program that runs a child on another machine

`calls.py` defines the requests and their results. The parent's end is asyncio (`RpcClient`): what it sends in one turn
of the event loop goes out in one write, and what a child sends in one write is read at once. The child's end
(`RpcServerSocket`) blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import orjson
from pydantic import BaseModel

from art.errors import ArtError, InvalidRequestError, ProcessError, error_from_code
from art.protocol.calls import Call, Result

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 2**31
HEARTBEAT_ID = 0
"""Number of the call that heartbeats answer, which nobody has made."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message between processes as JSON, after its length. Raises `InvalidRequestError` if the frame would be
    longer than `MAX_FRAME_BYTES`."""
    body = orjson.dumps(message, default=_plain, option=_OPTIONS)
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequestError(f"a message between processes has {len(body):,} bytes, at most {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Convert what orjson does not encode, or for dataclasses with slots encodes slowly."""
    if (names := getattr(value, "__dataclass_fields__", None)) is not None:
        return {name: getattr(value, name) for name in names}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not cross processes")


def error_body(error: BaseException) -> dict[str, Any]:
    """Encode an error for another process or the network. For an error from outside ART the message names its type."""
    if isinstance(error, ArtError):
        return {"code": error.code, "message": error.message, "param": error.param}
    return {"code": ArtError.code, "message": f"{type(error).__name__}: {error}", "param": None}


class FrameBuffer:
    """Joins the pieces in which frames arrive, and decodes each frame that is complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a frame, whose end has not come yet."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next piece, and return the messages that it completes, in order."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < _LENGTH.size or len(rest) < _LENGTH.size + _LENGTH.unpack_from(rest)[0]:
                return []
            data = bytes(rest)
            rest.clear()
        messages, start, size = [], 0, len(data)
        while size - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            if end > size:
                break
            messages.append(orjson.loads(data[start + _LENGTH.size : end]))
            start = end
        rest += data[start:]
        return messages


class CallFiles(Protocol):
    """Carries the files that calls name between this machine and that of the child."""

    async def sent(self, call: Call[Result]) -> Call[Result]:
        """Send the files that the call `reads`, and return the call with the paths that they have there."""

    async def fetched(self, call: Call[Any]) -> None:
        """Write what the child has made at the paths that the call `writes`, before its result is given to anybody."""


class RpcClient(asyncio.Protocol):
    """The parent's end of the connection to one child. When the child dies, pending calls raise `ProcessError`."""

    def __init__(
        self,
        on_heartbeat: Callable[[dict[str, Any]], None],
        explain_loss: Callable[[], Awaitable[ProcessError]] | None = None,
    ) -> None:
        """Not connected yet: see `connect`.

        Args:
            explain_loss: tells why the connection ended, e.g. how the child died. Pending calls wait for it.
        """
        self._on_heartbeat = on_heartbeat
        self._explain_loss = explain_loss
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, Callable[[dict[str, Any]], None]]] = {}
        """Calls that have not ended: their method, and what takes each answer."""
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        """Frames of this turn of the event loop. They go out together, so that an engine batches their requests."""
        self._closed: ProcessError | None = None
        self._is_lost = False
        """The child is gone, for a reason that is not known yet."""
        self.ended = asyncio.Event()
        """Set when the connection has ended."""
        self.files: CallFiles | None = None
        """Carries files, where the child runs on a machine that does not have those of this one."""
        self.on_control: Callable[[dict[str, Any]], None] = lambda message: None
        """Gets what the program that runs the child says itself."""
        self._explaining: asyncio.Task[None] | None = None

    async def connect(self, sock: socket.socket) -> RpcClient:
        """Make this the parent's end of a socket pair."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        return self

    def take_over(self, transport: asyncio.Transport) -> None:
        """Make this the parent's end of a connection that is open, on which nobody else reads any more."""
        transport.set_protocol(self)
        self.connection_made(transport)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, so that every call fails."""
        return self._is_lost or self._closed is not None

    async def call(self, call: Call[Result]) -> Result:
        """Make a call that has a single result. A caller that is cancelled cancels the call in the child."""
        async with contextlib.aclosing(self.stream(call)) as results:
            async for result in results:
                return result
        raise ProcessError(f"`{call.method}` ended without a result")

    async def stream(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Make a call and yield its results as they come. Leaving the loop early cancels the call in the child."""
        frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        files = self.files if call.reads or call.writes else None
        sent = call if files is None else await files.sent(call)
        if self._closed:
            raise self._closed
        call_id = next(self._ids)
        self._send({"id": call_id, "method": call.method, "params": sent.params})
        self._pending[call_id] = call.method, frames.put_nowait
        is_over = False
        try:
            while not is_over:
                frame = await frames.get()
                is_over = frame.get("last", False)
                if (error := frame.get("error")) is not None:
                    raise error_from_code(error["code"], error["message"], param=error.get("param"))
                if "result" in frame:
                    if is_over and files is not None:
                        await files.fetched(call)
                    yield call.decode_result(frame["result"])
        finally:
            del self._pending[call_id]
            if not is_over and not self._closed:  # the child stops it
                self._send({"cancel": call_id})

    def ask_to_stop(self, method: str) -> None:
        """Cancel the calls of `method` in the child, while their callers go on waiting. Each caller then learns whether
        its call was stopped (a `JobCancelledError`) or had already ended."""
        for call_id, (pending, _) in self._pending.items():
            if pending == method:
                self._send({"cancel": call_id})

    def control(self, **message: Any) -> None:
        """Say something to the program that runs the child on another machine."""
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        frame = encode_frame(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = b"".join(self._unsent), []
        # Nothing waits until it is written: a child always reads, and requests are small. A broken transport of uvloop
        # refuses writes. `connection_lost` then fails the calls that wait, with the reason.
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.write(frames)

    def fail(self, error: ProcessError) -> None:
        """End every pending call and every later one with `error`."""
        if self._closed is None:
            self._closed = error
        frame = {"error": error_body(self._closed), "last": True}
        for _, take in self._pending.values():
            take(frame)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self.fail(ProcessError("the connection was closed"))
        if self._explaining is not None:
            self._explaining.cancel()
        if self._transport is not None:
            self._transport.close()
            await self.ended.wait()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._buffer.feed(data):
            if "worker" in frame:
                self.on_control(frame)
            elif frame["id"] == HEARTBEAT_ID:
                self._on_heartbeat(frame["result"])
            elif frame["id"] in self._pending:
                self._pending[frame["id"]][1](frame)

    def connection_lost(self, exc: Exception | None) -> None:

        async def explain() -> None:
            lost = ProcessError("the process closed its connection")
            self.fail(await self._explain_loss() if self._explain_loss else lost)

        self._is_lost = True
        self.ended.set()
        if self._closed is None:
            self._explaining = asyncio.get_running_loop().create_task(explain())


Connect = Callable[[], Awaitable[RpcClient]]
"""Function that waits until a child process runs and returns the connection to it. A child that cannot be started is a
`ProcessError`."""


async def retry_on_process_death(
    connect: Connect, call: Callable[[RpcClient], Awaitable[T]], what: str, attempts: int
) -> T:
    """Return the result of `call`, which is made again on a new connection when its process dies.

    Nothing else repeats calls, except `ProcessEngine.generate`, which continues a completion. An error of `connect` is
    not retried.

    Args:
        call: must do no harm when it is repeated.
        what: names the call in the log.
        attempts: number of calls in all, from `RestartConfig`. After the last one the process's death is the error.
    """
    for attempt in itertools.count(1):
        client = await connect()
        try:
            return await call(client)
        except ProcessError as error:
            note_death(what, attempt, attempts, error)
    raise AssertionError("unreachable")


def note_death(what: str, attempt: int, attempts: int, error: ProcessError) -> None:
    """Log that attempt number `attempt` failed, or raise `error` if it was the last one."""
    if attempt >= attempts:
        raise error
    first_line = error.message.splitlines()[0]
    logger.warning("%s starts over (attempt %d of %d): %s", what, attempt + 1, attempts, first_line)


_RECEIVE_BYTES = 2**20
"""Largest number of bytes that are taken from the socket at a time."""


class RpcServerSocket:
    """The child's end of the connection to the server. Only one thread may read. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        """Place for what is received, so that a process that has run out of memory still reads what comes next."""
        self._buffer = FrameBuffer()
        self._frames: deque[dict[str, Any]] = deque()
        """Frames that have been read and not been taken."""
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any] | None:
        """Wait for the next frame; `None` when the parent is gone."""
        while not self._frames:
            if not self._receive(0):
                return None
        return self._frames.popleft()

    def arrived(self) -> Sequence[dict[str, Any]]:
        """Frames that have come and that `read` has not returned yet. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            self._receive(socket.MSG_DONTWAIT)
        return self._frames

    def until_hang_up(self) -> None:
        """Wait until the parent is gone. Reads nothing, so that any thread may call it."""
        hang_up = select.poll()
        hang_up.register(self._sock, 0)
        hang_up.poll()

    def _receive(self, flags: int) -> bool:
        """Take in what has come. False if the parent is gone."""
        try:
            num_bytes = self._sock.recv_into(self._received, 0, flags)
        except BlockingIOError:
            raise
        except OSError:
            return False
        self._frames += self._buffer.feed(bytes(self._received[:num_bytes]))
        return num_bytes > 0

    def reply(self, call_id: int, result: Any, *, last: bool = True) -> None:
        self._send({"id": call_id, "result": result, "last": last})

    def reply_many(self, replies: list[tuple[int, Any, bool]]) -> None:
        """Send several `(call_id, result, last)` in one system call."""
        self._send(*({"id": i, "result": result, "last": last} for i, result, last in replies))

    def fail(self, call_id: int, error: BaseException) -> None:
        self._send({"id": call_id, "error": error_body(error), "last": True})

    def heartbeat(self, status: dict[str, Any]) -> None:
        self._send({"id": HEARTBEAT_ID, "result": status})

    def _send(self, *messages: dict[str, Any]) -> None:
        data = b"".join(map(encode_frame, messages))
        with self._lock, contextlib.suppress(OSError):  # a vanished parent is noticed by `read`
            self._sock.sendall(data)
