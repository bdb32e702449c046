"""How many CPU threads a process of ART takes by default."""

from __future__ import annotations

import os


def default_num_threads() -> int:
    """Return half of the cores that this process may use. Trainer and engine run side by side, so each takes half."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)
