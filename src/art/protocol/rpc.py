"""Frames between the server and its engine and trainer processes, over an inherited socket pair.

A frame is a 4-byte big-endian length followed by that many bytes of JSON:

    request    {"id": 7, "method": "generate", "params": {...}}
    answers    {"id": 7, "result": {...}}                  any number, then one with "last": true
    failure    {"id": 7, "error": {"code": "...", "message": "..."}, "last": true}
    cancel     {"cancel": 7}
    heartbeat  {"id": 0, "result": {...}}                  from the child, about once a second

`calls.py` defines the requests and their results. The parent's end is asyncio (`RpcClient`). The child's end blocks
(`RpcServerSocket`), because a child reads in one thread and works in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from art.errors import ArtError, InvalidRequestError, ProcessError, error_from_code
from art.protocol.calls import Call, Result

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 2**31
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
HEARTBEAT_ID = 0


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message between processes as JSON, after its length.

    Raises:
        InvalidRequestError: the frame would be longer than `MAX_FRAME_BYTES`.
    """
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


@dataclass(slots=True)
class PendingCall:
    """A call to a child process that has not ended. Times are readings of `time.monotonic`."""

    method: str
    caller: str
    """Name of the asyncio task that made the call."""
    since: float
    last_frame: float
    """Time of the newest answer; before the first one the time of the call."""
    frames: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class RpcClient:
    """The parent's end of the connection to one child. When the child dies, pending calls raise `ProcessError`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_heartbeat: Callable[[dict[str, Any]], None],
        explain_loss: Callable[[], Awaitable[ProcessError]] | None = None,
    ) -> None:
        """
        Args:
            explain_loss: tells why the connection ended, e.g. how the child died. Pending calls wait for it.
        """
        self._reader = reader
        self._writer = writer
        self._on_heartbeat = on_heartbeat
        self._explain_loss = explain_loss
        self._ids = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._unsent: list[bytes] = []
        """Frames of this turn of the event loop, which go out together."""
        self._closed: ProcessError | None = None
        self._is_lost = False
        """The child is gone, for a reason that is not known yet."""
        self._task = asyncio.get_running_loop().create_task(self._read())

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, so that every call fails."""
        return self._is_lost or self._closed is not None

    @property
    def pending(self) -> list[PendingCall]:
        """Calls that have not ended, oldest first."""
        return list(self._pending.values())

    async def call(self, call: Call[Result]) -> Result:
        """Make a call that has a single result."""
        async for result in self.stream(call):
            return result
        raise ProcessError(f"`{call.method}` ended without a result")

    async def stream(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Make a call and yield its results as they come. Leaving the loop early cancels the call in the child."""
        if self._closed:
            raise self._closed
        call_id = next(self._ids)
        task, now = asyncio.current_task(), time.monotonic()
        pending = self._pending[call_id] = PendingCall(call.method, task.get_name() if task else "", now, now)
        finished = False
        try:
            # No drain: a child always reads and requests are small, and `drain` would cost a task switch per request.
            self._send({"id": call_id, "method": call.method, "params": call.params})
            while not finished:
                frame = await pending.frames.get()
                finished = frame.get("last", False)
                if (error := frame.get("error")) is not None:
                    raise error_from_code(error["code"], error["message"], param=error.get("param"))
                if "result" in frame:
                    yield call.decode_result(frame["result"])
        finally:
            self._pending.pop(call_id, None)
            if not finished and not self._closed:
                self._send({"cancel": call_id})

    def ask_to_stop(self, method: str) -> None:
        """Cancel the calls of `method` in the child, while their callers go on waiting.

        Each caller then learns whether its call was stopped (a `JobCancelledError`) or had already ended.
        """
        for call_id, pending in self._pending.items():
            if pending.method == method:
                self._send({"cancel": call_id})

    def _send(self, message: dict[str, Any]) -> None:
        frame = encode_frame(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        # A broken transport of uvloop refuses writes. `_read` then fails the calls that wait, with the reason.
        with contextlib.suppress(RuntimeError):
            self._writer.write(b"".join(frames))

    def fail(self, error: ProcessError) -> None:
        """End every pending call and every later one with `error`."""
        if self._closed is None:
            self._closed = error
        frame = {"error": error_body(self._closed), "last": True}
        for pending in self._pending.values():
            pending.frames.put_nowait(frame)

    async def close(self) -> None:
        self.fail(ProcessError("the connection was closed"))
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        reader = self._reader
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                frame = orjson.loads(await reader.readexactly(size))
                if frame["id"] == HEARTBEAT_ID:
                    self._on_heartbeat(frame["result"])
                elif (pending := self._pending.get(frame["id"])) is not None:
                    pending.last_frame = time.monotonic()
                    pending.frames.put_nowait(frame)
        except (asyncio.IncompleteReadError, OSError):
            self._is_lost = True
            explain = self._explain_loss
            self.fail(await explain() if explain else ProcessError("the process closed its connection"))


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
        attempts: number of calls in all, from `RestartConfig`.

    Raises:
        ProcessError: the process died during every attempt, or `connect` failed.
    """
    attempt = 1
    while True:
        client = await connect()
        try:
            return await call(client)
        except ProcessError as error:
            note_death(what, attempt, attempts, error)
            attempt += 1


def note_death(what: str, attempt: int, attempts: int, error: ProcessError) -> None:
    """Log that attempt number `attempt` failed, or raise `error` if it was the last one."""
    if attempt >= attempts:
        raise error
    first_line = error.message.splitlines()[0]
    logger.warning("%s starts over (attempt %d of %d): %s", what, attempt + 1, attempts, first_line)


class RpcServerSocket:
    """The child's end of the connection. `read` blocks and belongs to one thread. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._stream = sock.makefile("rb", buffering=1 << 20)
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any] | None:
        """Wait for the next frame; `None` when the parent is gone."""
        try:
            (size,) = _LENGTH.unpack(self._stream.read(_LENGTH.size))
            body = self._stream.read(size)
        except (OSError, struct.error):  # struct.error: the parent ended within the length
            return None
        frame: dict[str, Any] | None = orjson.loads(body) if len(body) == size else None
        return frame

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
