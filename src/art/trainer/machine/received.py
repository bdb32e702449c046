"""Folders for files that another machine sends to this one.

    ~/.cache/art/received/<host>/        or <folder>/<host>/, where the variable ART_RECEIVED names a folder
      call-0/           call-0.lock      files of the call under way, deleted once the processes here have read them
      Qwen3-8B-5ab1-0/  ....lock         a base model, which stays: the next start need not fetch it again

Nothing else on this machine is written or deleted. A process locks the folder that it uses, and the lock ends with the
process, however that ends. A process that takes a folder first deletes the other ones that nobody has locked: those of
processes that were killed, and base models that no trainer uses.
"""

from __future__ import annotations

import os
import shutil
import socket
from itertools import count
from pathlib import Path

from art.config.nodes import RECEIVED_VARIABLE
from art.storage.atomic import storage_errors
from art.storage.lock import take_lock


class Received:
    """A folder for files that this machine receives. This process has the lock on it."""

    def __init__(self, name: str) -> None:
        """Lock the first folder of this name that is free. It may have files that an earlier process received.

        Raises:
            DiskFullError, StorageError: the folder cannot be made.
        """
        root = _root()
        for number in count():
            self.folder = root / f"{name}-{number}"
            if (lock := take_lock(_lock_file(self.folder))) is not None:
                self._lock = lock
                break
        try:
            with storage_errors(self.folder, "making"):
                _delete_unused(root, self.folder)
                self.folder.mkdir(exist_ok=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes use or delete the folder."""
        os.close(self._lock)

    def delete(self) -> None:
        """Delete the folder and release its name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()


def _root() -> Path:
    folder = os.environ.get(RECEIVED_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(folder).expanduser() if folder else cache / "art" / "received"
    return root / socket.gethostname()  # machines may have a common home


def _lock_file(folder: Path) -> Path:
    """The file that is locked for a folder. It stays: a lock on a file that was deleted would keep nobody out."""
    return folder.with_name(f"{folder.name}.lock")


def _delete_unused(root: Path, own: Path) -> None:
    for folder in root.iterdir():
        if folder.is_dir() and folder != own and (lock := take_lock(_lock_file(folder))) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
