"""Write files and directories so that a crash cannot damage them: under a temporary name, fsynced, then renamed.

A reader sees the old content or the new content, never a part. A full disk is reported as `DiskFullError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from art.errors import DiskFullError, StorageError

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
    """Replace the content of the file `path` durably by `data`, which may come in pieces. Raises `DiskFullError` or
    `StorageError` if writing failed. Nothing was changed."""
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


# -- what Linux, macOS and Windows do differently --


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory. A file with the name `target` is replaced.

    Windows refuses while any program has one of the two open, such as a reader or a virus scanner. Most of them close
    it at once, so the renaming is tried for a second there.
    """
    for _ in range(20 if sys.platform == "win32" else 0):
        try:
            source.replace(target)
            return
        except PermissionError:
            time.sleep(0.05)
    source.replace(target)


def sync(path: Path) -> None:
    """Write the content of a file, or the entries of a directory, to the disk.

    Windows has no such call for directories, and wants to be able to write to a file that it syncs.
    """
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if sys.platform == "win32":
    import ctypes

    _SYNCHRONIZE, _STILL_RUNS, _ACCESS_DENIED = 0x100000, 258, 5

    def is_running(pid: int) -> bool:
        """Whether a process with this id runs. On Windows `os.kill(pid, 0)` would send it Ctrl-C."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = ctypes.c_void_p
        process = kernel.OpenProcess(_SYNCHRONIZE, False, pid)
        if not process:
            return ctypes.get_last_error() == _ACCESS_DENIED  # a process of another user
        try:
            return bool(kernel.WaitForSingleObject(ctypes.c_void_p(process), 0) == _STILL_RUNS)
        finally:
            kernel.CloseHandle(ctypes.c_void_p(process))

else:

    def is_running(pid: int) -> bool:
        """Whether a process with this id runs."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # the process runs as another user
        return True
