"""Frames between the server and its engine and trainer processes, over an inherited socket pair.

`frames/frame_encoding.py` writes and reads frames. Their messages are:

    request    {"id": 7, "method": "generate", "params": {...}}
    answers    {"id": 7, "result": {...}}                  any number, then one with "last": true
    failure    {"id": 7, "error": {"code": "...", "message": "..."}, "last": true}
    cancel     {"cancel": 7}
    heartbeat  {"id": 0, "result": {...}}                  from the child, about once a second

`calls.py` defines the requests and their results. The parent's end is asyncio (`RpcClient`): what it sends in one turn
of the event loop goes out in one write, and what a child sends in one write is read at once. The child's end
(`frames/rpc_child.py`) blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from art.errors import ProcessError, error_from_code
from art.protocol.calls import Call, Result
from art.protocol.frames.frame_encoding import HEARTBEAT_ID, FrameBuffer, encode_frame, error_body

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class PendingCall:
    """A call to a child process that has not ended. Times are readings of `time.monotonic`."""

    method: str
    caller: str
    """Name of the asyncio task that made the call."""
    since: float
    last_frame: float
    """Time of the newest answer; before the first one the time of the call."""
    take: Callable[[dict[str, Any]], None]
    """Takes each answer."""


class RpcClient(asyncio.Protocol):
    """The parent's end of the connection to one child. When the child dies, pending calls raise `ProcessError`."""

    def __init__(
        self,
        on_heartbeat: Callable[[dict[str, Any]], None],
        explain_loss: Callable[[], Awaitable[ProcessError]] | None = None,
    ) -> None:
        """Not connected yet: see `connect`."""
        self._on_heartbeat = on_heartbeat
        self._explain_loss = explain_loss
        self._ids = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        """Frames of this turn of the event loop, which go out together."""
        self._closed: ProcessError | None = None
        self._is_lost = False
        """The child is gone, for a reason that is not known yet."""
        self._ended = asyncio.Event()
        self._explaining: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        on_heartbeat: Callable[[dict[str, Any]], None],
        explain_loss: Callable[[], Awaitable[ProcessError]] | None = None,
    ) -> RpcClient:
        """Make the parent's end of a socket pair.

        Args:
            explain_loss: tells why the connection ended, e.g. how the child died. Pending calls wait for it.
        """
        sock.setblocking(False)
        client = cls(on_heartbeat, explain_loss)
        await asyncio.get_running_loop().create_connection(lambda: client, sock=sock)
        return client

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, so that every call fails."""
        return self._is_lost or self._closed is not None

    @property
    def pending(self) -> list[PendingCall]:
        """Calls that have not ended, oldest first."""
        return list(self._pending.values())

    async def call(self, call: Call[Result]) -> Result:
        """Make a call that has a single result. A caller that is cancelled cancels the call in the child."""
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def take(frame: dict[str, Any]) -> None:
            if not answered.done():
                answered.set_result(frame)

        call_id = self._begin(call, take)
        is_over = False
        try:
            frame = await answered
            is_over = frame.get("last", False)
        finally:
            self._end(call_id, is_over=is_over)
        _check(frame)
        if "result" not in frame:
            raise ProcessError(f"`{call.method}` ended without a result")
        return call.decode_result(frame["result"])

    async def stream(self, call: Call[Result]) -> AsyncGenerator[Result, None]:
        """Make a call and yield its results as they come. Leaving the loop early cancels the call in the child."""
        frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        call_id = self._begin(call, frames.put_nowait)
        is_over = False
        try:
            while not is_over:
                frame = await frames.get()
                is_over = frame.get("last", False)
                _check(frame)
                if "result" in frame:
                    yield call.decode_result(frame["result"])
        finally:
            self._end(call_id, is_over=is_over)

    def _begin(self, call: Call[Any], take: Callable[[dict[str, Any]], None]) -> int:
        """Send a call; return its id. `take` gets each answer."""
        if self._closed:
            raise self._closed
        call_id = next(self._ids)
        task, now = asyncio.current_task(), time.monotonic()
        self._pending[call_id] = PendingCall(call.method, task.get_name() if task else "", now, now, take)
        try:
            self._send({"id": call_id, "method": call.method, "params": call.params})
        except BaseException:  # it cannot be encoded
            del self._pending[call_id]
            raise
        return call_id

    def _end(self, call_id: int, *, is_over: bool) -> None:
        """Forget a call. The child stops it if it has not ended there."""
        self._pending.pop(call_id, None)
        if not is_over and not self._closed:
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
        # Nothing waits until it is written: a child always reads, and requests are small. A broken transport of uvloop
        # refuses writes. `connection_lost` then fails the calls that wait, with the reason.
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.write(b"".join(frames))

    def fail(self, error: ProcessError) -> None:
        """End every pending call and every later one with `error`."""
        if self._closed is None:
            self._closed = error
        frame = {"error": error_body(self._closed), "last": True}
        for pending in self._pending.values():
            pending.take(frame)

    async def close(self) -> None:
        self.fail(ProcessError("the connection was closed"))
        if self._explaining is not None:
            self._explaining.cancel()
        if self._transport is not None:
            self._transport.close()
            await self._ended.wait()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        for frame in self._buffer.feed(data):
            if frame["id"] == HEARTBEAT_ID:
                self._on_heartbeat(frame["result"])
            elif (pending := self._pending.get(frame["id"])) is not None:
                pending.last_frame = now
                pending.take(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._ended.set()
        if self._closed is None:
            self._explaining = asyncio.get_running_loop().create_task(self._fail_with_reason())

    async def _fail_with_reason(self) -> None:
        explain = self._explain_loss
        self.fail(await explain() if explain else ProcessError("the process closed its connection"))


def _check(frame: dict[str, Any]) -> None:
    """Raise the error that an answer brings, if it brings one."""
    if (error := frame.get("error")) is not None:
        raise error_from_code(error["code"], error["message"], param=error.get("param"))


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
