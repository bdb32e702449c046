"""An exclusive lock on an open file. The operating system releases it when the file is closed or its holder dies."""

from __future__ import annotations

import errno
import os
import sys

if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 2**30
    """Windows locks bytes, and nobody else can read a locked one: this one lies after everything in the file."""

    def lock_file(file: int) -> None:
        """Lock the file with a descriptor, without waiting.

        Raises:
            OSError: another holder has the lock (see `is_held`), or the file system has no locks.
        """
        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def lock_file(file: int) -> None:
        """Lock the file with a descriptor, without waiting.

        Raises:
            OSError: another holder has the lock (see `is_held`), or the file system has no locks.
        """
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(error: OSError) -> bool:
    """Whether `lock_file` failed because another holder has the lock."""
    return error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


def read_start(file: int, length: int) -> bytes:
    """Read the first `length` bytes of a file with a descriptor."""
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, length)
