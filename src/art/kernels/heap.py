"""The C library's allocator: how much freed memory a process keeps for its next tensors."""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 256 * 2**20
"""Freed memory at the end of the heap that the process keeps. Above it glibc returns all of it to the system.

By default glibc keeps up to twice the size of the largest tensor on the heap. A step then returns memory and asks for
it again hundreds of times, and the system fills each page with zeros: 27,000 pages in a step of a 5 M model with
4,500 tokens, which is 4 % of its CPU time. With 256 MiB it is none of them."""

_LARGEST_ON_HEAP = 32 * 2**20
"""Larger blocks go back to the system at once. It is glibc's own largest value, up to which it rises by itself; setting
the other threshold stops that."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` of freed memory at hand in this process. Without glibc it does nothing."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
