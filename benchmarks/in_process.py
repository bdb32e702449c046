"""The embedded engine without a process between: what is measured is the engine, or the loop around it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.engines.torch.embedded import Output, TorchEngine


def drain(engine: TorchEngine) -> Iterator[Output]:
    """Outputs of `engine` until it has no work. Raises the error of a request."""
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            yield output


class InProcessEngine:
    """`art.engine.Engine`, but for sampling; scores that are asked for at one moment share a batch."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._results: dict[str, list[float]] = {}

    async def info(self) -> EngineInfo:
        return self._engine.info()

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        request_id = f"score-{next(self._ids)}"
        self._engine.submit_score(request_id, token_ids, adapter)
        await asyncio.sleep(0)  # whoever else asks now comes into the same batch
        if request_id not in self._results:
            for output in drain(self._engine):
                assert output.logprobs is not None
                self._results[output.request_id] = output.logprobs
        return self._results.pop(request_id)

    def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        raise NotImplementedError("nobody samples through this one: `TorchEngine.submit` does")

    async def stats(self) -> dict[str, float]:
        return self._engine.stats()
