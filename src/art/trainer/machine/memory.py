"""Recognising that memory ran out, and getting back what can be had."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: of a device by its own type, of the CPU by what torch's allocator says."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def release_memory() -> None:
    """Free what failed passes left behind; outside of the `except` block, whose error holds on to their tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
