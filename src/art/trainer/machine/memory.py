"""Measure the memory that this process took at most and what was left then, and recognise that it ran out."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import torch

from art.kernels.process import peak_rss_bytes

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "MPS backend out of memory")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether `error` is a failed allocation: by its type, its number, or torch's message on a CPU and MPS."""
    is_kind = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", None) == errno.ENOMEM
    return is_kind or any(text in str(error) for text in _NO_MEMORY)


def release_memory() -> None:
    """Free the memory of failed passes. Call it outside the `except` block, whose error still holds their tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of `peak_bytes`, which is possible only on CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory: on CUDA of tensors since `reset_peak`, else what this process ever had resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_rss_bytes()


def headroom_bytes(device: torch.device) -> int:
    """Return how much memory was free at the process's peak: what is free now, minus what it has freed since."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    return _free_main_memory() - max(0, peak_bytes(device) - _resident_bytes())


def allocatable_bytes(device: torch.device) -> int:
    """Return how many bytes new tensors can take now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":  # it shares the main memory, and may have a part of it
        recommended, taken = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        return min(_free_main_memory(), int(recommended - taken))
    return _free_main_memory()


def available_bytes() -> int | None:
    """Return the main memory that can be used without swapping; `None` if the system does not tell."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return None


def _free_main_memory() -> int:
    """Bytes that are available on this machine, within the limit of its container."""
    free = available_bytes()
    if free is None:  # all memory that this process does not use
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - _resident_bytes()
    try:
        limit, used = (int((_CGROUP / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
    return min(free, limit - used)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return peak_bytes(torch.device("cpu"))
