"""The embedded engine in the calling process: each call runs the engine until its answer is complete."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import torch

from art.config import EngineConfig
from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.engines.torch.embedded import TorchEngine


class InProcessEngine:
    """An `Engine` that computes in the caller's thread, one request at a time."""

    def __init__(self, model: str) -> None:
        """
        Raises:
            ConfigError: the engine cannot serve `model`.
        """
        self._engine = TorchEngine.load(model, EngineConfig(device="cpu", num_threads=torch.get_num_threads()))
        self._ids = itertools.count()

    async def info(self) -> EngineInfo:
        return self._engine.info()

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        self._engine.submit(replace(request, request_id=str(next(self._ids))), stream=stream)
        while self._engine.has_work:
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                if output.chunk is not None:
                    yield output.chunk

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        self._engine.submit_score(str(next(self._ids)), token_ids, adapter)
        while self._engine.has_work:
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                if output.logprobs is not None:
                    return output.logprobs
        raise AssertionError("the engine ended without an answer")

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    async def stats(self) -> dict[str, float]:
        return self._engine.stats()
