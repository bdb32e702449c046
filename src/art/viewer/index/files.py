"""Finds the files of a run that the index is made from, and reads their new lines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, NamedTuple

import orjson

from art.errors import InvalidRequestError
from art.storage.layout import ModelPaths, validate_name
from art.viewer.conversation import Row

_MARK_SIZE = 4096
_CHUNK_BYTES = 1 << 20
"""Lines that are read at once take about this much, and one line at least."""
TRAIN = "train"


class FileState(NamedTuple):
    """What the disk has of one split and step. All fields are 0 where there is no file."""

    size: int = 0
    inode: int = 0
    changed_ns: int = 0
    plan_ns: int = 0
    """When the folder of the step changed, which has the records of what training did with the rollouts."""


Place = tuple[str, int]
"""Split and step."""


class Chunk(NamedTuple):
    """Some lines of a file."""

    groups: list[tuple[int, int, Row]]
    """Offset, length and content of each line that is a group, in bytes."""
    num_damaged: int
    end: int
    """Offset of the first byte that was not read."""
    is_last: bool
    """Whether every complete line was read."""


def survey(paths: ModelPaths) -> dict[Place, FileState]:
    """Look at all files of a run, without opening them."""
    plans = {step: entry.stat().st_mtime_ns for step, entry in _numbered(paths.steps, "")}
    states: dict[Place, FileState] = {}
    for split in _splits(paths.root / "trajectories"):
        for step, entry in _numbered(paths.root / "trajectories" / split, ".jsonl"):
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                if not S_ISREG(stat.st_mode):  # a link may lead to a private file, which an export would publish
                    continue
                plan_ns = plans.get(step, 0) if split == TRAIN else 0
                states[split, step] = FileState(stat.st_size, stat.st_ino, stat.st_mtime_ns, plan_ns)
    for step, changed_ns in plans.items():
        states.setdefault((TRAIN, step), FileState(plan_ns=changed_ns))
    return states


def outline(paths: ModelPaths) -> list[tuple[int, int]]:
    """Return times and sizes that tell whether a run has changed, without looking at each of its files.

    A script that logs rollouts adds a row to the history last. A job that ends adds a folder, but for a job that
    trained nothing.
    """
    folder = paths.root / "trajectories"
    states = []
    for path in (paths.history, paths.steps, folder, *(folder / split for split in _splits(folder))):
        try:
            stat = path.stat()
        except OSError:
            continue
        states.append((stat.st_mtime_ns, stat.st_size))
    return states


def read_chunk(path: Path, offset: int) -> Chunk:
    """Read complete lines from a byte offset. A last line without a newline counts if it is a JSON object.

    Raises:
        OSError: the file cannot be read.
    """
    groups: list[tuple[int, int, Row]] = []
    num_damaged = 0
    with path.open("rb") as file:
        file.seek(offset)
        end, is_last = offset, True
        for line in file:
            row = read_row(line)
            if row is None and not line.endswith(b"\n"):
                break  # a writer is in the middle of it, or crashed there
            if row is not None and isinstance(row.get("trajectories"), list):
                groups.append((end, len(line), row))
            elif line.strip():
                num_damaged += 1
            end += len(line)
            if end - offset >= _CHUNK_BYTES:
                is_last = False
                break
    return Chunk(groups, num_damaged, end, is_last)


def read_line(path: Path, offset: int, length: int) -> Row | None:
    """Read the group at a byte offset; `None` if the file has changed, and none is there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return read_row(file.read(length))
    except OSError:
        return None


def read_row(line: bytes) -> Row | None:
    """Decode a line; `None` if it is not a JSON object.

    Python's JSON has NaN, and single surrogates, which UTF-8 cannot hold. They become null and question marks.
    """
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            plain = json.dumps(json.loads(line, parse_constant=lambda name: None), ensure_ascii=False)
            row = orjson.loads(plain.encode(errors="replace"))
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def mark(path: Path, size: int) -> bytes:
    """Hash the beginning of a file and what is before `size`, by which a file that was replaced is noticed."""
    digest = hashlib.blake2b(digest_size=16)
    with contextlib.suppress(OSError), path.open("rb") as file:
        digest.update(_read(file, 0, min(_MARK_SIZE, size)))
        digest.update(_read(file, max(0, size - _MARK_SIZE), min(_MARK_SIZE, size)))
    return digest.digest()


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _splits(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(InvalidRequestError):
                if entry.is_dir(follow_symlinks=False):
                    yield validate_name(entry.name, param="split")


def _numbered(folder: Path, suffix: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Yield the entries of a folder that are named by a step, as `ModelPaths` names them."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(suffix)
            is_number = name.isascii() and name.isdecimal() and len(name) < 16
            if is_number and entry.name == f"{int(name):04d}{suffix}":
                yield int(name), entry
