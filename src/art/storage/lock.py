"""Locks of files that one process holds at a time. The kernel releases them when their holder dies."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from art.errors import StorageError
from art.storage.atomic import storage_errors

logger = logging.getLogger(__name__)

_without_lock: set[Path] = set()
POLL_S = 0.01
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
"""Errors of `lock_file` if another holder has the lock."""

if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 2**30
    """Windows locks bytes, and nobody else can read a locked one: this one lies after everything in the file."""

    def lock_file(file: int) -> None:
        """Lock a file as on Linux and macOS."""
        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def lock_file(file: int) -> None:
        """Lock the file with a descriptor, without waiting. Raises `OSError` if another holder has the lock, or the
        file system has no locks."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds the lock file `path`; `None` if no process does."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        lock_file(file)
    except OSError:
        os.lseek(file, 0, os.SEEK_SET)
        text = os.read(file, 32)
        return int(text) if text.isdigit() else None
    finally:
        os.close(file)
    return None


def take_lock(path: Path) -> int | None:
    """Lock a file for this process, if no other holder has it. Close the returned descriptor to release the lock.

    Returns:
        The descriptor, or `None` if somebody else holds the lock. On a file system without locks nobody ever does.
    """
    with storage_errors(path, "opening"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock_file(file)
    except OSError as error:
        if error.errno in _HELD:
            os.close(file)
            return None
        if path not in _without_lock:  # on some network file systems: better to run without one than not at all
            _without_lock.add(path)
            logger.warning("cannot lock %s (%s); make sure that only one program uses it", path, error.strerror)
    return file


def _wait_for_lock(path: Path, wait_s: float) -> int | None:
    """Take a lock as `take_lock` does, and try again for up to `wait_s` seconds while another holder has it."""
    deadline = time.monotonic() + wait_s
    while (file := take_lock(path)) is None and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    return file


@contextlib.contextmanager
def locked(path: Path, *, what: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file while the body runs.

    Args:
        what: what the lock is for, as in "copying folder X", for the error.

    Raises:
        StorageError: another holder has the lock for more than `wait_s` seconds, or the file cannot be opened.
    """
    if (file := _wait_for_lock(path, wait_s)) is None:
        raise StorageError(f"another program has been {what} for more than {wait_s:.0f} s; end it, then try again")
    try:
        yield
    finally:
        os.close(file)


class DirectoryLock:
    """Keeps a second server out of a data directory. Its file is never deleted and has its holder's id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, wait_s: float) -> None:
        """Take the lock. Waits up to `wait_s` seconds for another holder to end. Raises `StorageError` if another
        process still holds the lock. The message names it."""
        if (file := _wait_for_lock(self._path, wait_s)) is None:
            raise StorageError(
                f"the data directory {self._path.parent} is in use by another art-server (pid "
                f"{lock_holder(self._path) or 'unknown'}). Close its backend (`await backend.close()`) or end its "
                "process, choose another `path`, or connect to that server instead of starting a second one"
            )
        self._file = file
        with storage_errors(self._path, "writing"):
            os.ftruncate(file, 0)
            os.write(file, str(os.getpid()).encode())

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
