"""Give memory back to the system after large requests.

The allocator of glibc keeps what was freed for later, up to hundreds of MiB after a single large body. `keep_little`
makes it return each large block at once; `return_memory` returns what many small ones leave. Without glibc neither does
anything.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

LARGE_BYTES = 2**20
"""Bodies below this size leave nothing that is worth returning."""
PAUSE_S = 1.0
"""Shortest time between two returns: many large requests in a row share one."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGEST_KEPT = 2**19
_NUM_ARENAS = 4


@functools.cache
def _glibc() -> Any:
    """The C library, if it has the functions of glibc."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def keep_little() -> None:
    """Make the allocator return blocks above `_LARGEST_KEPT` when they are freed. Call it before threads start."""
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_ARENA_MAX, _NUM_ARENAS)  # each thread would otherwise keep memory of its own


_pending: set[asyncio.AbstractEventLoop] = set()


def return_memory(size_bytes: int) -> None:
    """Soon return what a request of this size has freed, in a thread. Call it in a coroutine."""
    loop = asyncio.get_running_loop()
    if size_bytes < LARGE_BYTES or loop in _pending or (library := _glibc()) is None:
        return

    def trim() -> None:
        _pending.discard(loop)
        loop.run_in_executor(None, library.malloc_trim, 0)

    _pending.add(loop)
    loop.call_later(PAUSE_S, trim)
