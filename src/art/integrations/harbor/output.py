"""Reads the output of a process whose background processes may keep it open, and keeps its beginning and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

MAX_READ_BYTES = 16 * 2**20
"""Size of an output after which it is not read on, so that a command cannot keep this process busy."""


class CutOutput:
    """The first and the last bytes of an output."""

    def __init__(self, limit: int) -> None:
        self._half, self.size = limit // 2, 0
        self._first, self._last = bytearray(), bytearray()

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        free = self._half - len(self._first)
        self._first += piece[:free]
        self._last = (self._last + piece[free:])[-self._half :] if free < len(piece) else self._last

    def text(self) -> str:
        left_out = self.size - len(self._first) - len(self._last)
        gap = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return bytes(self._first + gap + self._last).decode(errors="replace")


@contextlib.contextmanager
def output_pipe(output: CutOutput) -> Iterator[tuple[asyncio.Future[None], int]]:
    """A pipe whose writing end is for a process, and whose other end is read into `output`, up to 16 MiB.

    A process that writes more finds the pipe closed, which ends most programs.

    A process's own pipe would do, but asyncio waits for its end, and background processes may keep it open. uvloop's
    `connect_read_pipe` closes its file descriptor twice, and so now and then a file of another thread.

    Yields:
        A future that is done at the end of the output, and the file descriptor of the writing end, to be closed.
    """
    reading_end, writing_end = os.pipe()
    os.set_blocking(reading_end, False)
    loop = asyncio.get_running_loop()
    at_end: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not at_end.done():
            loop.remove_reader(reading_end)
            os.close(reading_end)
            at_end.set_result(None)

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(reading_end, 65536)
            output.add(piece)
            if not piece or output.size > MAX_READ_BYTES:
                stop()

    loop.add_reader(reading_end, read)
    try:
        yield at_end, writing_end
    finally:
        stop()
