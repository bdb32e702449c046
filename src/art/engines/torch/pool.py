"""All engines of one process: one for the base model with its adapters, and one for each full checkpoint.

A full checkpoint shares no weights with the base model, so it has a `TorchEngine` of its own, with its own KV cache and
`max_running`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from art.config import EngineConfig
from art.engine import AdapterInfo, EngineInfo, GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.engines.torch.weights.full import is_full, load_full

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
    def load(cls, model: str, config: EngineConfig) -> EnginePool:
        """Load the base model `model`, a folder or a hub id. Raises `ConfigError` if it cannot be served."""
        return cls(TorchEngine.load(model, config), model, config)

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
