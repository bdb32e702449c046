"""How much memory was left when a step used most."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from art.trainer.machine.usage import peak_memory_bytes

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def headroom_bytes(device: torch.device) -> int:
    """Free memory at the process's peak: what is free now, minus what the process has given back since its peak."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    return _free_main_memory() - max(0, peak_memory_bytes(device) - _resident_bytes())


def _free_main_memory() -> int:
    """Bytes that are available on this machine, within the limit of its container."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: all memory that this process does not use
        free = os.sysconf("SC_PHYS_PAGES") * page - _resident_bytes()
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
    return min(free, limit - used)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return peak_memory_bytes(torch.device("cpu"))
