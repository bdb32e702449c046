"""All engines of one process: one for the base model with its adapters, and one for each full checkpoint.

A full checkpoint shares no weights with the base model, so it has a `TorchEngine` of its own, with its own KV cache and
`max_running`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from art.config import EngineConfig, Quantization
from art.engine import AdapterInfo, EngineInfo, GenerateRequest
from art.engines.torch.base_model import choose_device, load_model
from art.engines.torch.embedded import TorchEngine
from art.errors import AdapterError, ConfigError
from art.kernels.grammar import Vocabulary

_COUNTERS = ("generated_tokens", "prefill_tokens", "cached_tokens", "steps", "step_s", "preemptions")
"""Statistics that only grow. Counts of an engine are kept after it is unloaded."""


class EnginePool:
    """All `TorchEngine`s of a process, used like one: a request goes to the engine with the weights that it names."""

    def __init__(self, base: TorchEngine, model: str, config: EngineConfig) -> None:
        self._base = base
        self._model = model
        self._config = config
        self._full: dict[str, TorchEngine] = {}
        self._leaving: list[TorchEngine] = []
        """Unloaded engines whose last requests still run."""
        self._counted = dict.fromkeys(_COUNTERS, 0.0)

    @classmethod
    def load(cls, model: str, config: EngineConfig, quantization: Quantization = "none") -> EnginePool:
        """Load the base model `model`, a folder or a hub id. Raises `ConfigError` if it cannot be served."""
        return cls(TorchEngine.load(model, config, quantization), model, config)

    @property
    def busy(self) -> list[TorchEngine]:
        """The engines that have work. The owner of the pool calls `step` of each of them in turn."""
        if not self._full and not self._leaving:  # the usual case, on the path of every step
            return [self._base] if self._base.has_work else []
        return [engine for engine in self._engines if engine.has_work]

    def info(self) -> EngineInfo:
        return self._base.info()

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all engines."""
        total = dict(self._counted)
        for engine in self._engines:
            for name, value in engine.stats().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def submit(self, request: GenerateRequest, *, stream: bool) -> None:
        self._of(request.adapter).submit(request, stream=stream)

    def submit_score(self, request_id: str, token_ids: list[int], adapter: str | None) -> None:
        self._of(adapter).submit_score(request_id, token_ids, adapter)

    def cancel(self, request_id: str) -> None:
        for engine in self._engines:
            engine.cancel(request_id)

    def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        """Load an adapter, or a full checkpoint into an engine of its own.

        If `name` is in use, later requests get the new weights and running ones keep theirs.

        Raises:
            AdapterError: a file is unreadable, or does not fit the base model, this engine or the memory.
        """
        if not is_full(path):
            info = self._base.load_adapter(name, path)
            if name in self._full:
                self.unload_adapter(name)
            return info
        gc.collect()  # free the memory of unloaded engines first; a trainer may need it on the same device
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        elif torch.backends.mps.is_available():
            torch.mps.empty_cache()
        with torch.inference_mode():
            engine, info = load_full(name, path, self._model, self._config, self._base.vocabulary)
        self.unload_adapter(name)
        self._full[name] = engine
        return info

    def unload_adapter(self, name: str, on_done: Callable[[], None] | None = None) -> None:
        """Refuse new requests for `name`. `on_done` is called when its last request has ended, possibly at once."""
        engine = self._full.pop(name, None)
        if engine is None:
            self._base.unload_adapter(name, on_done)
            return
        self._leaving.append(engine)

        def forget() -> None:
            self._leaving.remove(engine)
            stats = engine.stats()
            for counter in _COUNTERS:
                self._counted[counter] += stats[counter]
            if on_done is not None:
                on_done()

        engine.unload_adapter(name, forget)

    def _of(self, adapter: str | None) -> TorchEngine:
        return self._base if adapter is None else self._full.get(adapter, self._base)

    @property
    def _engines(self) -> list[TorchEngine]:
        return [self._base, *self._full.values(), *self._leaving]


WEIGHTS_FILE = "model.safetensors"


def is_full(path: Path) -> bool:
    """Whether the checkpoint in folder `path` holds a whole model instead of an adapter."""
    return (path / WEIGHTS_FILE).is_file()


def load_full(
    name: str, path: Path, base_model: str, config: EngineConfig, vocabulary: Vocabulary | None = None
) -> tuple[TorchEngine, AdapterInfo]:
    """Load the full checkpoint in folder `path`, trained from `base_model`, into an engine that serves it as `name`.

    Args:
        vocabulary: that of the base model's engine.

    Raises:
        AdapterError: the checkpoint is unreadable, does not fit the base model or does not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    def refuse(problem: str) -> AdapterError:
        return AdapterError(f"full checkpoint {name!r}: {path}: {problem}")

    # All weights of the base model as in its files (tied ones once), on the CPU. They are read again, since those of
    # the engine are fused and packed. The memory is freed after the check.
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=choose_device(config)[1], use_safetensors=True)
    tied = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {key for key, _ in model.named_parameters()}
    base: dict[str, Tensor] = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    if problem := _misfit(path / WEIGHTS_FILE, base):
        raise refuse(problem)
    norm = math.nan

    def measure(model: Any) -> None:
        """Take the Frobenius norm of the difference of all weights from the base, in float64 on the CPU."""
        nonlocal norm
        weights = model.state_dict()
        changes = (weights[key].cpu().float() - start.float() for key, start in base.items())
        norm = math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in changes))
        if not math.isfinite(norm):
            raise refuse("it holds NaN or infinite values")

    try:
        engine = TorchEngine(load_model(str(path), config, measure), config, vocabulary)
    except ConfigError as error:
        raise refuse(error.message) from error
    except torch.OutOfMemoryError as error:
        hint = "set a lower `engine.kv_cache_tokens`, or train a LoRA"
        raise refuse(f"it does not fit into memory with the base model and other checkpoints; {hint}") from error
    info = AdapterInfo(name=name, num_layers=len(base), rank=0, norm=norm)
    engine.serve_as(name, info)
    return engine, info


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
