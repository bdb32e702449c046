"""Folders that the test processes of one run share: the first one that needs a folder makes it, and the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this run that all its processes read and none changes.

    Args:
        folders: the factory of temporary folders of this process.
        name: name of the folder, the same in all processes.
        make: fills the folder, which does not exist yet. Only one process calls it. If it fails, the next one tries.
    """
    own = folders.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = shared / f"{name}.half-{os.getpid()}"
            make(half)
            half.rename(folder)
    return folder
