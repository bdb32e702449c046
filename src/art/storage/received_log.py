"""Keep the log that a script on another machine sends: the same files that it would write here, by the same writers.

A script sends each row of its history with the groups that it logged, in parts, and sends a part again if it got no
answer. A row has the time at which it was written, so the same row is the same call:

    the row is new          append it, then the groups
    the row is there        append the groups that are missing: an earlier part, a crash in between, or a script that
                            wrote into this very directory
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art.storage.atomic import storage_errors
from art.storage.jsonl import append_lines, encode
from art.storage.layout import ModelPaths

_writing = threading.Lock()
"""Keeps two copies of one request from both finding that the row is new."""


def append_once(
    paths: ModelPaths, split: str, step: int, row: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Append a row to the history and groups to the file of their split and step, unless they are there.

    Raises:
        InvalidRequestError: `split` is not a valid name.
        DiskFullError, StorageError: writing failed. Sending the same again completes it.
    """
    path = paths.trajectories(split, step)
    with _writing:
        if _has_line(paths.history, row):
            groups = [group for group in groups if not _has_line(path, group)]
        else:
            append_lines(paths.history, [dict(row)])
        if groups:
            append_lines(path, groups)


def _has_line(path: Path, row: Mapping[str, Any]) -> bool:
    """Whether a file of JSON lines has exactly this row."""
    line = encode(dict(row)).encode()
    if not path.exists():
        return False
    with storage_errors(path, "reading"), path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(line)
            while at >= 0:
                before, after = content[max(0, at - 1) : at], content[at + len(line) : at + len(line) + 1]
                if before in (b"", b"\n") and after in (b"", b"\n"):  # the last line may lack its end
                    return True
                at = content.find(line, at + 1)
    return False
