"""Write files and directories so that a crash cannot damage them: under a temporary name, fsynced, then renamed.

A reader sees the old content or the new content, never a part. A full disk is reported as `DiskFullError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from art.errors import DiskFullError, StorageError
from art.storage.portable import is_running, rename, sync

_TEMPORARY = ".tmp-"


@contextlib.contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate an `OSError` in the body to ART's errors. `doing` describes the action, e.g. "writing".

    Raises:
        DiskFullError: no space or quota is left.
        StorageError: the operating system reported any other error.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"the disk is full: {doing} {path} failed and was undone. Free space on it (old checkpoints are the "
                "largest files) or move the data directory, then try again"
            ) from error
        raise StorageError(f"{doing} {path} failed: {error.strerror or error}") from error


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` under which this process writes: `.<name>.tmp-<pid>`."""
    return path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace the content of the file `path` durably by `data`, which may come in pieces.

    Raises:
        DiskFullError, StorageError: writing failed. Nothing was changed.
    """
    temporary = temporary_name(path)
    try:
        with storage_errors(path, "writing"):
            with temporary.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
            sync(temporary)
            rename(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill with files. After the block it becomes `path`, durably and atomically.

    Args:
        replace: replace the directory `path`, which must not exist otherwise.

    Raises:
        DiskFullError, StorageError: writing failed. `path` was not changed, and no temporary file is left.
    """
    temporary = temporary_name(path.with_name(f"{path.name}.new"))  # deletions use other temporary names
    try:
        with storage_errors(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for entry in (*temporary.iterdir(), temporary):
                sync(entry)
        if replace and path.exists():
            remove_directory(path)
        with storage_errors(path, "writing"):
            rename(temporary, path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Delete a directory. A crash can leave a part of it under a temporary name, never under `path`."""
    temporary = temporary_name(path)
    with storage_errors(path, "deleting"):
        rename(path, temporary)
        sync(path.parent)
        shutil.rmtree(temporary)


def remove_leftovers(directory: Path) -> list[str]:
    """Delete the temporary files and directories of processes that no longer run. Returns their names."""
    removed = []
    for entry in directory.glob(f".*{_TEMPORARY}*") if directory.is_dir() else ():
        writer = entry.name.rpartition(_TEMPORARY)[2]
        if writer.isdigit() and int(writer) != os.getpid() and not is_running(int(writer)):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
            removed.append(entry.name)
    return removed
