"""Choose the size of the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from art.config import EngineConfig
from art.engines.torch.weights.base_model import LoadedModel
from art.errors import ConfigError

AVERAGE_REQUEST_TOKENS = 4096
"""Expected tokens of a request, used for the default size."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARE = {"cpu": 0.25, "cuda": 0.4, "mps": 0.25}
"""Share of the device's memory for the cache (of its free memory, where that is known). The trainer needs the rest."""


def kv_budget(model: LoadedModel, config: EngineConfig) -> int:
    """Return how many tokens the KV cache may hold: the configured number, else what requests need and memory allows.

    Raises:
        ConfigError: a single request of full length would not fit.
    """
    max_context = model.info.max_context
    if config.kv_cache_tokens is not None:
        budget, source = config.kv_cache_tokens, f"`engine.kv_cache_tokens` is {config.kv_cache_tokens}"
    else:
        fits = int(_device_bytes(model.info.device) * _SHARE[model.info.device] / _token_bytes(model))
        needed = max(max_context, config.max_running * min(max_context, AVERAGE_REQUEST_TOKENS))
        budget, source = min(needed, fits), f"the memory allows a KV cache of {fits} tokens"
    if budget < max_context:
        raise ConfigError(
            f"{source}, but a request may have `max_context` = {max_context} tokens; set a lower `engine.max_context`"
        )
    return budget


def _token_bytes(model: LoadedModel) -> int:
    elements = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.kv_shapes)
    return elements * int(model.dtype.itemsize)


def _device_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return physical
