"""Recognising that memory ran out, and freeing what can be freed."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed. Devices have an error type for it; on a CPU only the message of torch tells."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def release_memory() -> None:
    """Free the memory of failed passes. Call it outside the `except` block, whose error still holds their tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
