"""The memory of the trainer's device: what a process took at most and what was left then, that it ran out, and how much
a step may keep for its backward pass.

With `gradient_checkpointing="auto"` on CUDA, the least recomputation is chosen whose activations, by a forecast, fit
into the free memory for the largest micro-batch of the step. Elsewhere "auto" keeps all activations.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from art.config import TrainerConfig
from art.kernels.process import peak_rss_bytes
from art.memory import MODES, Checkpointing, activation_bytes, shape_of
from art.trainer.distributed import Team
from art.trainer.policy.base_model import configured_mode, set_checkpointing
from art.trainer.policy.policy import Policy
from art.trainer.tree import SamplePath

_log = logging.getLogger(__name__)

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


def _free_main_memory() -> int:
    """Bytes that are available on this machine without swapping, within the limit of its container."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: all memory that this process does not use
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


# -- what to keep for the backward pass --

_USABLE = 0.8
"""Share of the free memory that activations may take. The rest is for gradients inside a layer, the head and the
attention's workspace, and for what the allocator cannot use."""


def prepare_checkpointing(
    policy: Policy, config: TrainerConfig, paths: Sequence[SamplePath], *, max_tokens: int, team: Team
) -> float:
    """Set how the layers of `policy` checkpoint in a step on `paths`, the same way in all processes of `team`.

    Returns:
        The position of the mode in `MODES`.
    """
    mode = configured_mode(config)
    if mode is None:
        mode = "none"
        if policy.base.device.type == "cuda":
            lengths = [len(path.token_ids) for path in paths]
            num_tokens = max(max(lengths), min(max_tokens, sum(lengths)))
            forecasts = forecast_activations(policy, num_tokens)
            mode = choose_mode(forecasts, num_tokens, allocatable_bytes(policy.base.device))
        mode = MODES[max(map(MODES.index, team.gather(mode)))]
        set_checkpointing(policy.trained_model, mode)
    return float(MODES.index(mode))


def choose_mode(forecasts: dict[Checkpointing, int], num_tokens: int, free_bytes: int) -> Checkpointing:
    """Choose the first of `MODES` whose activations fit into `free_bytes`, and log which and why."""
    if not forecasts:
        _log.warning("gradient checkpointing: full, since the shape of this model's layers is unknown")
        return "full"
    mode = next((mode for mode in MODES if forecasts[mode] <= _USABLE * free_bytes), MODES[-1])
    listed = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in forecasts.items())
    _log.info(
        "gradient checkpointing: %s; expected activations of %d tokens: %s; %d %% of %.1f GiB free memory are for them",
        *(mode, num_tokens, listed, 100 * _USABLE, free_bytes / 2**30),
    )
    return mode


def forecast_activations(policy: Policy, num_tokens: int) -> dict[Checkpointing, int]:
    """Forecast the bytes of activations of a micro-batch in each mode; empty if the layers have an unknown shape."""
    model: Any = policy.base.model
    try:
        shape = shape_of(model.config.get_text_config().to_dict())
    except KeyError:
        return {}
    settings: Any = {"dtype": str(policy.base.head.weight.dtype).removeprefix("torch."), "lora": policy.config}
    return {mode: activation_bytes(shape, num_tokens, **settings, checkpointing=mode) for mode in MODES}
