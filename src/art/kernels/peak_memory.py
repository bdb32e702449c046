"""The largest resident memory that this process has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_rss_bytes() -> int:
    """Return the process's peak resident memory in bytes.

    Linux's VmHWM begins when the program starts. The figure of `getrusage` begins with that of the process that started
    this one, which may be larger.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere
