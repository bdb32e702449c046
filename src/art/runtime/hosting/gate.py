"""A gate before an engine: requests wait at it while the engine sleeps or exchanges its weights.

request --> open? --> engine --> answer
              |
            closed: new requests wait here
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
    """Lets requests pass while it is open, as it is at first."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """
        Args:
            what: names the engine in messages.
            timeout_s: longest wait for the gate to open.
        """
        self._what = what
        self._timeout_s = timeout_s
        self._open = asyncio.Event()
        self._open.set()
        self._num_closers = 0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_until_open(self) -> None:
        """
        Raises:
            ProcessError: the gate stayed closed for too long.
        """
        while not self._open.is_set():
            async with waiting(f"{self._what} to take requests again", self._timeout_s):
                await self._open.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let no new request pass during the body. The gate opens when the last such body ends."""
        self._num_closers += 1
        self._open.clear()
        try:
            yield
        finally:
            self._num_closers -= 1
            if self._num_closers == 0:
                self._open.set()


class GatedEngine:
    """Implements `art.engine.Engine`. Calls that compute something wait at the gate first."""

    def __init__(self, engine: ProcessEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.in_use: Counter[str | None] = Counter()
        """Number of requests that run or wait, by adapter."""
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until no request is past the gate.

        Raises:
            ProcessError: that took longer than `timeout_s`.
        """
        while self._num_inside:
            async with waiting("requests of the previous policy to end", timeout_s):
                await self._empty.wait()

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        self.in_use[request.adapter] += 1
        try:
            await self._gate.wait_until_open()
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
        await self._gate.wait_until_open()
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
