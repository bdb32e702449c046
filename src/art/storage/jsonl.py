"""Files with one JSON object per line, which are only appended to.

A crash while appending can leave an incomplete last line. Such a row was never reported as written: readers skip it,
and the next writer removes it. Numbers that JSON does not have (NaN, infinities) are written as null.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from art.storage.atomic import storage_errors
from art.storage.lock import locked

logger = logging.getLogger(__name__)

_writing = threading.Lock()
"""Keeps two threads from appending at the same time. Between processes the lock of the file does so."""
_LOCK_WAIT_S = 60.0
"""Longest wait for another process that appends. An append takes milliseconds: a longer one has been stopped."""


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows durably. Several processes may append to the same file. Raises `DiskFullError` or `StorageError` if
    writing failed. Nothing was appended."""
    data = "".join(encode(row) + "\n" for row in rows).encode()
    with (
        _writing,
        storage_errors(path, "appending to"),
        locked(path, what=f"appending to {path}", wait_s=_LOCK_WAIT_S),
        path.open("ab+") as file,
    ):
        # The last complete row ends at the last newline, or at the end of the file if the rest is a JSON object.
        size = start = file.seek(0, os.SEEK_END)
        tail = b""
        while start and b"\n" not in tail:
            block = min(start, 65_536)
            start -= block
            tail = _read_at(file, start, block) + tail
        line = tail.rpartition(b"\n")[2]
        end = size if not line or _row_of(line) is not None else size - len(line)
        file.truncate(end)
        if end and _read_at(file, end - 1, 1) != b"\n":
            data = b"\n" + data
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _lines_from(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield each line after a byte offset, and the offset after the line. A missing file has no lines."""
    if not path.exists():
        return
    with storage_errors(path, "reading"), path.open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            yield line, offset


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield line number and row of every line; the row is `None` for a line that is not a JSON object.

    Empty lines and an incomplete last line are skipped. A missing file has no lines.
    """
    for number, (line, _) in enumerate(_lines_from(path), start=1):
        row = _row_of(line)
        if row is None:
            if not line.strip() or not line.endswith(b"\n"):
                continue
            logger.warning("skipped line %d of %s, which is not a JSON object", number, path)
        yield number, row


def missing_rows(path: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of some rows that a file does not have as exactly these lines. A missing file has none."""
    lines = [(encode(row).encode(), row) for row in rows]
    encoded = {line for line, _ in lines}
    present = {text for line, _ in _lines_from(path) if (text := line.removesuffix(b"\n")) in encoded}
    return [row for line, row in lines if line not in present]


def read_rows_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete rows after a byte offset; return rows and the next offset. A missing file has no rows."""
    lines = list(read_lines_from(path, offset))
    return [row for row, _ in lines if row is not None], lines[-1][1] if lines else offset


def read_lines_from(path: Path, offset: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield the row of each complete line after a byte offset, and the offset after the line, one line at a time.

    The row is `None` for a line that is not a JSON object. A missing file has no lines.
    """
    for line, end in _lines_from(path, offset):
        if line.endswith(b"\n") and line.strip():
            yield _row_of(line), end


def encode(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON, with null for NaN and infinities."""
    try:
        line = json.dumps(row, allow_nan=False, ensure_ascii=False)
    except ValueError:
        line = json.dumps(_without_nan(row), allow_nan=False, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: models and tools write that, and UTF-8 cannot hold it
        return json.dumps(json.loads(line))
    return line


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
