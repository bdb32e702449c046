"""Load a full checkpoint (all weights were trained), after checking that it is the base model with other weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from art.config import EngineConfig
from art.engine import AdapterInfo
from art.engines.torch.embedded import TorchEngine
from art.engines.torch.weights.base_model import choose_device, load_model
from art.errors import AdapterError, ConfigError

WEIGHTS_FILE = "model.safetensors"


def is_full(path: Path) -> bool:
    """Whether the checkpoint in folder `path` holds a whole model instead of an adapter."""
    return (path / WEIGHTS_FILE).is_file()


def load_full(name: str, path: Path, base_model: str, config: EngineConfig) -> tuple[TorchEngine, AdapterInfo]:
    """Load the full checkpoint in folder `path`, trained from `base_model`, into an engine that serves it as `name`.

    Raises:
        AdapterError: the checkpoint is unreadable, does not fit the base model or does not fit into memory.
    """

    def refuse(problem: str) -> AdapterError:
        return AdapterError(f"full checkpoint {name!r}: {path}: {problem}")

    base = _base_weights(base_model, config)
    if problem := _misfit(path / WEIGHTS_FILE, base):
        raise refuse(problem)
    norm = math.nan

    def measure(model: Any) -> None:
        nonlocal norm
        norm = _change_norm(model, base)
        if not math.isfinite(norm):
            raise refuse("it holds NaN or infinite values")

    try:
        engine = TorchEngine(load_model(str(path), config, measure), config)
    except ConfigError as error:
        raise refuse(error.message) from error
    except torch.OutOfMemoryError as error:
        raise refuse(
            "it does not fit into memory with the base model and other full checkpoints; set a lower "
            "`engine.kv_cache_tokens`, or train a LoRA"
        ) from error
    info = AdapterInfo(name=name, num_layers=len(base), rank=0, norm=norm)
    engine.serve_as(name, info)
    return engine, info


def _base_weights(base_model: str, config: EngineConfig) -> dict[str, Tensor]:
    """All weights of the base model as in its files (tied ones once), in the engine's dtype and on the CPU.

    They are read again, since the engine's own weights are fused and packed. The memory is freed after the check.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=choose_device(config)[1], use_safetensors=True)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _misfit(file: Path, base: dict[str, Tensor]) -> str | None:
    """Why the tensors in `file` do not fit the base model, or `None`. (transformers would initialise missing ones.)"""
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {key: list(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        return f"{file.name} cannot be read, it is corrupted ({error})"
    other = "; was it trained from another model?"
    if difference := sorted(shapes.keys() ^ base.keys()):
        count = f"{len(difference)} tensors are missing or unknown, the first is {difference[0]!r}"
        return f"{file.name} does not fit the base model: {count}{other}"
    for key, shape in shapes.items():
        if shape != list(base[key].shape):
            return f"{file.name} has {key!r} of shape {shape}, expected {list(base[key].shape)}{other}"
    return None


def _change_norm(model: Any, base: dict[str, Tensor]) -> float:
    """Frobenius norm of the difference of all weights of `model` from `base`, summed in float64 on the CPU."""
    weights = model.state_dict()
    differences = (weights[name].cpu().float() - start.float() for name, start in base.items())
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in differences))
