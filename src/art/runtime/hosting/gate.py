"""A gate before an engine: requests wait at it while the engine sleeps or exchanges its weights, and for their turn.

request --> seat? --> closed? --> engine --> answer
              |         |
              |       new requests wait here until it is open
            requests wait here for their turn (`seats.py`)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

from art.engine import GenerateRequest, Sender, Timings, TokenChunk
from art.engines.process import ProcessEngine
from art.protocol.rpc import Connect
from art.runtime.hosting.seats import Seats
from art.runtime.hosting.shares import SharedTime
from art.runtime.supervision.waits import waiting


class Hold:
    """A hold lasts while at least one `with hold.held()` block runs. Others can wait for its end."""

    def __init__(self, end: str) -> None:
        """`end` describes the end of the hold, in messages about waiting for it."""
        self._end = end
        self._num_holders = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self._began = 0.0
        self._total_s = 0.0
        self.waited_s = 0.0
        """Waits for its end so far, summed over all who waited."""

    @property
    def lasts(self) -> bool:
        return self._num_holders > 0

    @property
    def total_s(self) -> float:
        """Seconds for which it has lasted so far."""
        return self._total_s + (time.monotonic() - self._began if self.lasts else 0.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        if not self.lasts:
            self._began = time.monotonic()
        self._num_holders += 1
        self._ended.clear()
        try:
            yield
        finally:
            total_s = self.total_s
            self._num_holders -= 1
            if self._num_holders == 0:
                self._total_s = total_s
                self._ended.set()

    async def until_ended(self, timeout_s: float) -> None:
        """Wait until no `held` block runs.

        Raises:
            ProcessError: the hold lasted longer than `timeout_s`.
        """
        began = time.monotonic()
        try:
            while self.lasts:
                async with waiting(self._end, timeout_s):
                    await self._ended.wait()
        finally:
            self.waited_s += time.monotonic() - began


class GatedEngine(ProcessEngine):
    """An engine process with a gate: calls that sample or score tokens wait while `closed` is held."""

    def __init__(self, connect: Connect, attempts: int, name: str, timeout_s: float, seats: Seats) -> None:
        """
        Args:
            name: names the engine in messages.
            timeout_s: longest wait for the gate to open, and for the requests that have passed it.
        """
        super().__init__(connect, attempts)
        self._timeout_s = timeout_s
        self.seats = seats
        self.in_use: Counter[str | None] = Counter()
        """Number of requests that run or wait, by adapter."""
        self.closed = Hold(f"the {name} to take requests again")
        self._inside = Hold("requests of the previous policy to end")
        self.shared_time = SharedTime()
        self.on_sampled: Callable[[Sender, str | None, float], None] = lambda sender, adapter, seconds: None
        """Called after each request with its sender, its adapter and its share of the engine's time in seconds."""

    @property
    def sampling_s(self) -> float:
        """Seconds for which at least one request had passed the gate, so far."""
        return self._inside.total_s

    async def until_empty(self) -> None:
        """Wait until all requests that have passed the gate have ended.

        Raises:
            ProcessError: that took longer than `timeout_s`.
        """
        await self._inside.until_ended(self._timeout_s)

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        async with self._admitted(request) as waited_s, aclosing(super().generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                yield chunk if chunk.timings is None else _with_wait(chunk, chunk.timings, waited_s)

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        async with self._admitted(request) as waited_s:
            chunk = await super().generate_whole(request)
        return chunk if chunk.timings is None else _with_wait(chunk, chunk.timings, waited_s)

    @asynccontextmanager
    async def _admitted(self, request: GenerateRequest) -> AsyncIterator[float]:
        """Wait for a seat and an open gate, and count the request as inside during the body.

        Yields:
            the seconds that the request waited.
        """
        self.in_use[request.adapter] += 1
        arrived = time.perf_counter()
        try:
            async with self.seats.taken(request.sender):
                await self.closed.until_ended(self._timeout_s)
                note = partial(self.on_sampled, request.sender, request.adapter)
                with self._inside.held(), self.shared_time.taken(note):
                    yield time.perf_counter() - arrived
        finally:
            self.in_use[request.adapter] -= 1

    async def stats(self) -> dict[str, float]:
        """The engine's numbers. Requests that wait for a seat are among the waiting ones."""
        stats = await super().stats()
        return {**stats, "waiting": stats["waiting"] + self.seats.num_waiting}

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        await self.closed.until_ended(self._timeout_s)
        with self._inside.held():
            return await super().score(token_ids, adapter)


def _with_wait(chunk: TokenChunk, timings: Timings, waited_s: float) -> TokenChunk:
    """Count the wait at the gate as a part of the wait for the engine."""
    if timings.queue_s is None:
        return chunk
    return replace(chunk, timings=replace(timings, queue_s=timings.queue_s + waited_s))
