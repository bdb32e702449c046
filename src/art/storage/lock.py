"""One server per data directory: a lock that its holder's death releases, however it dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from art.errors import StorageError
from art.storage.atomic import storage_errors

logger = logging.getLogger(__name__)

POLL_S = 0.1


def lock_holder(path: Path) -> int | None:
    """The process that holds the lock `path`; `None` if nobody does."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(file, 32, 0).decode(errors="replace")
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(file)


def directory_gone(path: Path) -> StorageError:
    """The error of a data directory that is not there any more."""
    return StorageError(
        f"the data directory {path} was deleted, moved or replaced while its server was running, and checkpoints and "
        "records with it. Close the backend (`await backend.close()`) or end the server, put the directory back if you "
        "have a copy, and start again"
    )


class DirectoryLock:
    """Taken by one process at a time. The file stays; what counts is the kernel's lock on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, wait_s: float) -> None:
        """Take the lock, waiting for a holder that is about to end.

        Raises:
            StorageError: another process holds it still after `wait_s`; the message names it.
        """
        with storage_errors(self._path, "opening"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._until_held(file, wait_s)
            with storage_errors(self._path, "writing"):
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def check_directory(self) -> None:
        """
        Raises:
            StorageError: the directory is gone, or another one stands in its place.
        """
        try:
            here = os.stat(self._path)
        except OSError:
            here = None
        if self._file is not None and (here is None or not os.path.samestat(here, os.fstat(self._file))):
            raise directory_gone(self._path.parent)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _until_held(self, file: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    # Some network file systems know no locks: better unguarded than useless.
                    logger.warning("cannot lock %s (%s): make sure that one server uses it", self._path, error.strerror)
                    return
            holder = os.pread(file, 32, 0).decode(errors="replace") or "unknown"
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the data directory {self._path.parent} is in use by another art-server (pid {holder}). Close its "
                    "backend (`await backend.close()`) or end its process, choose another `path`, or connect to that "
                    "server instead of starting a second one"
                )
            if not announced:
                announced = True
                logger.info("%s is held by pid %s: waiting up to %.0f s for its end", self._path, holder, wait_s)
            time.sleep(POLL_S)
