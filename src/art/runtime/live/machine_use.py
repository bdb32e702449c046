"""What processes and the data directory use of the machine: cores, GPU memory, disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from art.protocol.live.system import DevicePart, DiskPart

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 5.0
COUNT_AGAIN_S = 60.0
"""Time between two counts of the size of the data directory."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and all its descendants, from Linux's /proc; `None` where that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    children: list[str] = []
    with contextlib.suppress(OSError):  # some kernels do not have this file
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(cpu_seconds(int(child)) or 0.0 for child in children)


def gpu_memory() -> list[DevicePart]:
    """List the GPUs with their memory, as `nvidia-smi` has them; none where it does not answer. Blocks."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpu_memory(done.stdout) if done.returncode == 0 else []


def parse_gpu_memory(listing: str) -> list[DevicePart]:
    """Parse lines such as "NVIDIA H200, 1024, 143771", in MiB. A GPU that does not tell its memory is left out."""
    parts = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            used, total = (int(field) * 2**20 for field in fields[1:])
            parts.append(DevicePart(name=fields[0], used_bytes=used, total_bytes=total))
    return parts


class DirectorySize:
    """Counts the bytes of a directory in a thread of its own, since it may hold a million files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: int | None = None
        self._counted_at = float("-inf")
        self._thread: threading.Thread | None = None

    def disk(self) -> DiskPart:
        """The size as it was last counted, and the free space. Begins to count again when it is time."""
        is_due = time.monotonic() - self._counted_at > COUNT_AGAIN_S
        if is_due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._count, name="size of the data directory", daemon=True)
            self._thread.start()
        usage = shutil.disk_usage(self._root)
        return DiskPart(data_bytes=self._bytes, free_bytes=usage.free, total_bytes=usage.total)

    def _count(self) -> None:
        total, folders = 0, [self._root]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:  # files may go meanwhile
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        with contextlib.suppress(OSError):
                            total += entry.stat(follow_symlinks=False).st_size
        self._bytes, self._counted_at = total, time.monotonic()
