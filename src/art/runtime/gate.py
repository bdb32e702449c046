"""Where requests wait while an engine must not be asked: it sleeps, or its weights are being replaced.

request --> open? --> engine --> answer
              |
            closed: those that come wait here, and those inside may be waited for
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.engines.process import ProcessEngine
from art.runtime.waits import waiting


class Gate:
    """Open at first."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """
        Args:
            what: What lies behind it, in words.
            timeout_s: Of each wait, for it to open or for those inside to leave.
        """
        self._what = what
        self._timeout_s = timeout_s
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._num_inside = self._num_closers = 0

    async def opened(self) -> None:
        """Returns when it is open, at once if it is.

        Raises:
            ProcessError: it stayed closed for too long.
        """
        while not self._open.is_set():
            async with waiting(f"{self._what} to take requests again", self._timeout_s):
                await self._open.wait()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Go in when it is open, and leave at the end. Does not give way to other tasks if it is open."""
        await self.opened()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def closed(self, *, drained: bool) -> AsyncIterator[None]:
        """Let nobody in; with `drained`, begin only when everybody is out.

        Raises:
            ProcessError: that took too long.
        """
        self._num_closers += 1
        self._open.clear()
        try:
            if drained:
                async with waiting(f"the requests of {self._what} to end", self._timeout_s):
                    await self._empty.wait()
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

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        async with self._gate.entered(), aclosing(self._engine.generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return await self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._engine.unload_adapter(name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        async with self._gate.entered():
            return await self._engine.score(token_ids, adapter)

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()
