"""Where requests wait while an engine must not be asked, because it sleeps or its weights are exchanged.

request --> open? --> engine --> answer
              |
            closed: those that come wait here
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.engines.process import ProcessEngine
from art.runtime.supervision.waits import waiting


class Gate:
    """Open at first."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """
        Args:
            what: What lies behind it, in words.
            timeout_s: Of a wait for it to open.
        """
        self._what = what
        self._timeout_s = timeout_s
        self._open = asyncio.Event()
        self._open.set()
        self._num_closers = 0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        """Returns when it is open, at once if it is.

        Raises:
            ProcessError: it stayed closed for too long.
        """
        while not self._open.is_set():
            async with waiting(f"{self._what} to take requests again", self._timeout_s):
                await self._open.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let nobody in during the body; who is inside stays there. It opens with the end of the last such body."""
        self._num_closers += 1
        self._open.clear()
        try:
            yield
        finally:
            self._num_closers -= 1
            if self._num_closers == 0:
                self._open.set()


class GatedEngine:
    """Implements `art.engine.Engine`: that of `engine`, behind `gate` where something is computed."""

    def __init__(self, engine: ProcessEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.in_use: Counter[str | None] = Counter()
        """Requests that run or wait, by adapter."""
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def emptied(self, timeout_s: float) -> None:
        """Returns when nothing is computed behind the gate.

        Raises:
            ProcessError: that took longer than `timeout_s`.
        """
        while self._num_inside:
            async with waiting("requests of the policy before to end", timeout_s):
                await self._empty.wait()

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        self.in_use[request.adapter] += 1
        try:
            await self._gate.opened()
            with self._inside():
                async with aclosing(self._engine.generate(request, stream=stream)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            self.in_use[request.adapter] -= 1

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return await self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._engine.unload_adapter(name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        await self._gate.opened()
        with self._inside():
            return await self._engine.score(token_ids, adapter)

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()
