"""The lock that keeps a second server out of a data directory. The kernel releases it when its holder dies."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from art.errors import DirectoryGoneError, StorageError
from art.storage.atomic import storage_errors
from art.storage.portable.file_lock import is_held, lock_file, read_start

logger = logging.getLogger(__name__)

POLL_S = 0.01


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds the lock file `path`; `None` if no process does."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        lock_file(file)
    except OSError:
        text = read_start(file, 32).decode(errors="replace")
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(file)


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
        if is_held(error):
            os.close(file)
            return None
    return file


@contextlib.contextmanager
def locked(path: Path, *, what: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file while the body runs.

    Args:
        what: what the lock is for, as in "copying folder X", for the error.

    Raises:
        StorageError: another holder has the lock for more than `wait_s` seconds, or the file cannot be opened.
    """
    deadline = time.monotonic() + wait_s
    while (file := take_lock(path)) is None:
        if time.monotonic() > deadline:
            raise StorageError(f"another program has been {what} for more than {wait_s:.0f} s; end it, then try again")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(file)


def directory_gone(file: Path) -> DirectoryGoneError:
    """Make the error for a data directory that was removed, or lost `file`, while its server was running."""
    return DirectoryGoneError(
        f"the data directory {file.parent} was deleted, moved or replaced while its server was running, or {file.name} "
        "in it was, so nothing is written any more. Close the backend (`await backend.close()`) or end the server, "
        "restore the directory if you have a copy, and start again"
    )


def check_same_file(path: Path, opened: os.stat_result) -> None:
    """Check that `path` still names the file that was opened.

    Raises:
        DirectoryGoneError: the file, or its directory, was removed or replaced.
    """
    try:
        current = os.stat(path)
    except OSError:
        raise directory_gone(path) from None
    if not os.path.samestat(current, opened):
        raise directory_gone(path)


class DirectoryLock:
    """A lock that one process holds at a time. The file is never deleted; only the kernel's lock on it counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, wait_s: float) -> None:
        """Take the lock. Waits up to `wait_s` seconds for another holder to end.

        Raises:
            StorageError: another process still holds the lock. The message names it.
        """
        with storage_errors(self._path, "opening"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._until_held(file, wait_s)
            with storage_errors(self._path, "writing"):
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, str(os.getpid()).encode())
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def check_directory(self) -> None:
        """Check that the data directory is still the one that was locked.

        Raises:
            StorageError: the directory was removed or replaced.
        """
        if self._file is not None:
            check_same_file(self._path, os.fstat(self._file))

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _until_held(self, file: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        announced = False
        while True:
            try:
                lock_file(file)
                return
            except OSError as error:
                if not is_held(error):
                    # Some network file systems do not support locks. Run without one rather than not at all.
                    logger.warning(
                        "cannot lock %s (%s); make sure that only one server uses it", self._path, error.strerror
                    )
                    return
            holder = read_start(file, 32).decode(errors="replace") or "unknown"
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the data directory {self._path.parent} is in use by another art-server (pid {holder}). Close its "
                    "backend (`await backend.close()`) or end its process, choose another `path`, or connect to that "
                    "server instead of starting a second one"
                )
            if not announced:
                announced = True
                logger.info("pid %s holds %s; waiting up to %.0f s for it to end", holder, self._path, wait_s)
            time.sleep(POLL_S)
