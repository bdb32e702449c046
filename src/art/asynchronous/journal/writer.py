"""The thread that writes a journal. Records that wait while it writes are its next batch: one write, one fsync."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from art.asynchronous.journal.kept import JournalState
from art.asynchronous.journal.lines import Span, frame_line
from art.errors import ArtError, ConflictError
from art.storage.atomic import storage_errors, write_file
from art.storage.jsonl import encode

logger = logging.getLogger(__name__)

MAX_BATCH = 256
"""Most records in a batch, so that the first of them does not wait long for the last."""
MIN_DEAD_BYTES = 2**20
"""A journal is not rewritten for less than this. Above it, once half of its bytes no longer count."""

MakeRecord = Callable[[], Mapping[str, Any]]
"""Function that makes a record. The thread calls it, so that dumping a rollout does not stop the event loop."""


@dataclass(frozen=True, slots=True)
class _Entry:
    make: MakeRecord
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class JournalWriter:
    """Appends records to a file durably, and rewrites the file without lines that no longer count."""

    def __init__(self, path: Path, state: JournalState) -> None:
        """
        Args:
            state: what the file at `path` says, if there is one. The writer rewrites the file at once.
        """
        self._path, self._state = path, state
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._file: BinaryIO | None = None
        """The file, without a buffer; `None` after a failed write, until the file is rewritten."""
        self._size, self._batch, self._compact_above = 0, 0, 0
        self._is_closed = False
        self._compact()
        self._thread = threading.Thread(target=self._run, name="pipeline-journal", daemon=True)
        self._thread.start()

    async def write(self, make: MakeRecord) -> None:
        """Append a record; returns when it is on disk.

        Raises:
            DiskFullError, StorageError: it could not be written. Nothing was appended.
        """
        if self._is_closed:
            raise ConflictError(f"the journal {self._path} is closed; open it again")
        loop = asyncio.get_running_loop()
        entry = _Entry(make, loop.create_future(), loop)
        self._queue.put(entry)
        await entry.done

    def close(self) -> None:
        """Write what waits, and end the thread. It blocks until then."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._queue.get()]
            while len(waiting) < MAX_BATCH and not self._queue.empty():
                waiting.append(self._queue.get())
            is_open = None not in waiting
            self._append([entry for entry in waiting if entry is not None])
            self._compact_if_worth_it()
        self._close_file()

    def _append(self, entries: list[_Entry]) -> None:
        """Write one batch, and tell those who wait."""
        ready: list[tuple[_Entry, Mapping[str, Any], bytes]] = []
        for entry in entries:
            try:
                record = entry.make()
                ready.append((entry, record, encode(dict(record))[1:].encode()))
            except Exception as error:  # of this record alone, e.g. metadata that JSON does not have
                _tell([entry], error)
        if not ready:
            return
        written = [entry for entry, _, _ in ready]
        try:
            spans = self._write([content for _, _, content in ready])
        except Exception as error:
            logger.exception("the journal %s cannot be written", self._path)
            _tell(written, error)
            return
        for (_, record, _), span in zip(ready, spans, strict=True):
            self._state.fold(record, span)
        _tell(written, None)

    def _write(self, contents: list[bytes]) -> list[Span]:
        if self._file is None:
            self._compact()
        file, self._file = self._file, None
        assert file is not None
        lines, spans, end = _frame(contents, self._batch, self._size)
        with storage_errors(self._path, "appending to"):
            try:
                file.seek(self._size)
                data = memoryview(b"".join(lines))
                while data:
                    data = data[os.write(file.fileno(), data) :]
                os.fsync(file.fileno())
            except OSError:
                file.close()
                raise
        self._file, self._size, self._batch = file, end, self._batch + 1
        return spans

    def _compact_if_worth_it(self) -> None:
        if self._size <= self._compact_above:
            return
        if 2 * (live := self._state.live_bytes) > self._size:
            self._compact_above = 2 * live
            return
        try:
            self._compact()
        except ArtError as error:
            self._compact_above = 2 * self._size
            with suppress(OSError):
                self._open_file()
            logger.warning("%s stays as long as it is: %s", self._path, error)

    def _compact(self) -> None:
        """Rewrite the file: the head, then the lines that count, as batch 0."""
        lists = self._state.spans()
        places = [one for spans in lists for one in spans]
        moved, size = list[Span](), 0

        def lines() -> Iterator[bytes]:
            nonlocal size
            for content in chain([encode(self._state.head.record())[1:].encode()], _read(self._path, places)):
                line, span = frame_line(content, batch=0, of=1 + len(places), offset=size)
                moved.append(span)
                size += len(line)
                yield line

        self._close_file()  # Windows cannot replace an open file
        write_file(self._path, lines())
        rest = moved[1:]
        for spans in lists:
            spans[:], rest = rest[: len(spans)], rest[len(spans) :]
        with storage_errors(self._path, "opening"):
            self._open_file()
        self._size, self._batch, self._compact_above = size, 1, max(MIN_DEAD_BYTES, 2 * size)

    def _open_file(self) -> None:
        self._file = self._path.open("r+b", buffering=0)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _frame(contents: list[bytes], batch: int, offset: int) -> tuple[list[bytes], list[Span], int]:
    """The lines of one batch, their spans, and the size of the file after them."""
    lines, spans = [], []
    for content in contents:
        line, span = frame_line(content, batch=batch, of=len(contents), offset=offset)
        lines.append(line)
        spans.append(span)
        offset += len(line)
    return lines, spans, offset


def _read(path: Path, spans: list[Span]) -> Iterator[bytes]:
    if spans:
        with path.open("rb") as file:
            for span in spans:
                file.seek(span.offset)
                yield file.read(span.length)


def _tell(entries: list[_Entry], error: Exception | None) -> None:
    def tell() -> None:
        for entry in entries:
            if entry.done.cancelled():
                continue
            if error is None:
                entry.done.set_result(None)
            else:
                entry.done.set_exception(error)

    loop = entries[0].loop  # a journal belongs to one event loop
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)
