"""The child's end of the connection between the server and one of its processes; `art.protocol.rpc` has the other."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from typing import Any

from art.protocol.frames.frame_encoding import HEARTBEAT_ID, FrameBuffer, encode_frame, error_body

_RECEIVE_BYTES = 2**20
"""Largest number of bytes that are taken from the socket at a time."""


class RpcServerSocket:
    """The child's end of the connection. Only one thread may read. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
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

    def has_frame(self) -> bool:
        """Whether `read` would return a frame without waiting."""
        if not self._frames:
            with contextlib.suppress(BlockingIOError):
                self._receive(socket.MSG_DONTWAIT)
        return bool(self._frames)

    def until_hang_up(self) -> None:
        """Wait until the parent is gone. Any thread may; nothing is read."""
        hang_up = select.poll()
        hang_up.register(self._sock, 0)
        hang_up.poll()

    def _receive(self, flags: int) -> bool:
        """Read what has arrived; false when the parent is gone.

        Raises:
            BlockingIOError: nothing has, and `flags` say not to wait.
        """
        try:
            data = self._sock.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            return False
        self._frames += self._buffer.feed(data)
        return bool(data)

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
