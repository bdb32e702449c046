"""A disk that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges that this user does not have")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(os.urandom(4096))
