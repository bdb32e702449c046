"""What a process of ART takes by default and at most: threads and memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def default_num_threads() -> int:
    """Return half of the cores that this process may use. Trainer and engine run side by side, so each takes half."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)


def peak_rss_bytes() -> int:
    """Return the process's peak resident memory in bytes.

    Linux's VmHWM begins when the program starts. The figure of `getrusage` begins with that of the process that started
    this one, which may be larger.
    """
    if (status := Path("/proc/self/status")).exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere
