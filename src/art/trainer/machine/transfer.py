"""Send files from the first process of a team to the first process of each other machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from art.errors import StorageError
from art.storage.atomic import storage_errors
from art.storage.portable import rename, sync
from art.trainer.machine.distributed import Team

PIECE_BYTES = 16 * 2**20
"""Bytes that are sent at a time."""


@dataclass(frozen=True, slots=True)
class SentFile:
    name: str
    size: int
    mtime_ns: int


def transfer(team: Team, files: Iterable[SentFile], folder_of: Callable[[SentFile], Path | None]) -> None:
    """Send `files`, one after the other. The first process of each machine calls this; the others do not.

    A file appears under its name once every machine has all of its bytes. If reading or writing fails in one process,
    all of them still exchange the rest of the file, and stop then.

    Args:
        folder_of: on the first process returns the folder of a file; elsewhere the folder to write it to, or `None` if
            that machine does not need it.

    Raises:
        DiskFullError, StorageError: this process has failed. It returns if only others have.
    """
    problem: StorageError | None = None
    for file in files:
        folder = folder_of(file)
        pieces = _exchange(team, file.size)
        try:
            if folder is not None and team.rank == 0:
                _read(folder / file.name, pieces)
            elif folder is not None:
                _write(_unfinished(folder, file), file, pieces)
        except StorageError as error:
            problem = error
        for _ in pieces:
            pass
        if team.on_any_machine(problem is not None):
            break
        if folder is not None and team.rank > 0:
            try:
                with storage_errors(folder / file.name, "writing"):
                    rename(_unfinished(folder, file), folder / file.name)
            except StorageError as error:
                problem = error
    if problem is not None:
        raise problem


def _unfinished(folder: Path, file: SentFile) -> Path:
    return folder / f"{file.name}.part"


def _exchange(team: Team, size: int) -> Iterator[memoryview]:
    """Yield each piece of a file: on the first process to be filled before it is sent, elsewhere when it has come."""
    buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        piece = buffer[: size - start]
        if team.rank == 0:
            yield memoryview(piece.numpy())
        team.tell_machines(piece)
        if team.rank > 0:
            yield memoryview(piece.numpy())


def _read(path: Path, pieces: Iterator[memoryview]) -> None:
    with storage_errors(path, "reading"), path.open("rb") as file:
        for piece in pieces:
            if file.readinto(piece) < len(piece):
                raise StorageError(f"{path} became shorter while it was sent to another machine")


def _write(path: Path, file: SentFile, pieces: Iterator[memoryview]) -> None:
    with storage_errors(path, "writing"):
        with path.open("wb") as target:
            target.writelines(pieces)
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        sync(path)
