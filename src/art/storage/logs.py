"""Log files of processes: opened for appending, kept from growing for ever, read from their end."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 32 * 2**20
"""A log that is longer is put aside as `<name>.old`, in place of the one before."""
TAIL_LINES = 15
_TAIL_BYTES = 16_384


def open_log(path: Path) -> BinaryIO:
    """The log, to be given to a process that starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(f"{path.name}.old"))
    return path.open("ab")


def rotate_log(path: Path) -> None:
    """Put a long log aside while its process writes on; to be called now and then.

    The process keeps its descriptor, whoever in it writes (Python, a library in C, a traceback of its death), so the
    content is copied and the file emptied. Appending goes on at the start. A line written in between may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk, or no log: the process is not to suffer for it
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.old"))
            os.truncate(path, 0)


def log_size(path: Path) -> int:
    """Bytes; 0 if there is no log."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_since(path: Path, size: int) -> str:
    """What was written after the log had `size` bytes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(min(size, log_size(path)))
        return file.read().decode(errors="replace")
    return ""


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, introduced for use at the end of an error message; empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
        if text:
            tail = "\n  ".join(text.splitlines()[-lines:])
            return f"\nLast lines of {path}:\n  {tail}"
    return ""
