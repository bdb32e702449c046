"""Open, rotate and read the log files of processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from art.storage.atomic import storage_errors
from art.storage.log_lines import clean

MAX_LOG_BYTES = 32 * 2**20
"""A longer log is moved to `<name>.old`, which replaces the one there."""
TAIL_LINES = 15
_TAIL_BYTES = 16_384


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, to be passed to a new process. A log over `MAX_LOG_BYTES` is moved away first.

    Raises:
        DiskFullError, StorageError: the log cannot be opened.
    """
    with storage_errors(path, "opening"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
        return path.open("ab")


def rotate_log(path: Path) -> None:
    """Move a log over `MAX_LOG_BYTES` away while its process goes on writing. Call this from time to time.

    The process keeps its file descriptor, through which Python and C libraries write. So the content is copied, and the
    file is emptied. A line that is written in between may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk or a missing log must not disturb the process
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.old"))
            os.truncate(path, 0)


def log_size(path: Path) -> int:
    """Size of a log in bytes; 0 if there is no log."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_since(path: Path, size: int) -> str:
    """Return the text that was written to a log after it had `size` bytes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(min(size, log_size(path)))
        return clean(file.read().decode(errors="replace"))
    return ""


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log with a heading, to append to an error message; empty if there is no log."""
    tail = log_since(path, max(0, log_size(path) - _TAIL_BYTES)).strip().splitlines()[-lines:]
    return "\n  ".join([f"\nLast lines of {path}:", *tail]) if tail else ""
