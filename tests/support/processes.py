"""Looking at processes from outside, through Linux's /proc."""

from __future__ import annotations

import time
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Process ids in ascending order, so mostly in the order of their start."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.parent.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)
