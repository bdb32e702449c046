"""What Linux, macOS and Windows do differently with names, files and processes. One module: `import art` loads it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_RENAME_TRIES = 20
_RENAME_PAUSE_S = 0.05
_DEVICES = frozenset({"AUX", "CON", "NUL", "PRN", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))})


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory. A file with the name `target` is replaced.

    Windows refuses while any program has one of the two open, such as a reader or a virus scanner. Most of them close
    it at once, so the renaming is tried for a second there.
    """
    for _ in range(_RENAME_TRIES if sys.platform == "win32" else 0):
        try:
            source.replace(target)
            return
        except PermissionError:
            time.sleep(_RENAME_PAUSE_S)
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


def is_refused_by_windows(name: str) -> bool:
    """Whether Windows refuses a name of letters, digits, dots, hyphens and underscores for a file or a folder.

    It names a device, with any ending (`con`, `nul.txt`), or ends in a dot, which Windows drops.
    """
    return name.partition(".")[0].upper() in _DEVICES or name.endswith(".")


def other_spelling(path: Path) -> str | None:
    """Return the real name of the file or folder at `path`, if it differs from that in `path` in its letters' case.

    `None` if they are equal or nothing is there. Names differ where the file system ignores case, as usual on macOS and
    Windows.
    """
    if not path.exists():
        return None
    names = os.listdir(path.parent)
    return None if path.name in names else next((n for n in names if n.lower() == path.name.lower()), None)


if sys.platform == "win32":
    import ctypes

    _SYNCHRONIZE = 0x100000
    _STILL_RUNS = 258
    _ACCESS_DENIED = 5

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
