"""Peak memory of a piece of work beyond what was in use before it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from art.kernels.process import peak_rss_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_peak_bytes(function: Callable[[], object], device: str) -> int:
    """Run `function`; the most memory that it had in use at once, less what was in use before.

    On CPU this is resident memory of the process. Linux counts its peak anew for each call; elsewhere only a peak above
    every earlier one can be seen, so that only the first call of a process counts.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    _release_freed_memory()
    if _restart_peak():
        before = _status_bytes("VmRSS")
        function()
        return _status_bytes("VmHWM") - before
    before = peak_rss_bytes()
    function()
    return peak_rss_bytes() - before


def _restart_peak() -> bool:
    """Whether the peak of resident memory is counted anew from here: see `man 5 proc_pid_clear_refs`."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _release_freed_memory() -> None:
    """Memory that was freed, but that the C library keeps, would be reused and not be seen to grow."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # other C libraries keep little
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
