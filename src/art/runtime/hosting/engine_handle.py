"""The engine of one base model, seen from the server: its process, its sleep, and the gate before it. Requests wait at
the gate while the engine sleeps or exchanges its weights, and for their turn.

request --> seat? --> closed? --> engine --> answer
              |         |
              |       new requests wait here until it is open
            requests wait here for their turn (`seats.py`)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

from art.config import ServerConfig
from art.config.server import CALL_ATTEMPTS
from art.engine import EngineInfo, GenerateRequest, Sender, Timings, TokenChunk
from art.engines.process import ProcessEngine
from art.errors import ProcessError
from art.protocol.calls import Wake
from art.protocol.rpc import Connect, RpcClient
from art.runtime.hosting.seats import Seats
from art.runtime.supervision.process import ChildProcess, ChildSpec, MakeProcess
from art.runtime.supervision.waits import waiting


class SharedTime:
    """While n requests run, each uses 1/n of the time. The shares add up to the time in which any request ran.

    It costs the same for any number of requests: a clock runs at 1/n of the speed of real time, and a request's share
    is what that clock has gone on by between its begin and its end.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_running = 0
        self._num_pauses = 0
        self._shared_s = 0.0
        """What the clock shows."""
        self._at = 0.0
        """Real time at which it was last read."""

    @contextmanager
    def taken(self, on_end: Callable[[float], None]) -> Iterator[None]:
        """Count a request as running during the body, then call `on_end` with the seconds of its share."""
        began = self._read()
        self._num_running += 1
        try:
            yield
        finally:
            ended = self._read()
            self._num_running -= 1
            on_end(ended - began)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time during the body: the engine sleeps."""
        self._read()
        self._num_pauses += 1
        try:
            yield
        finally:
            self._read()
            self._num_pauses -= 1

    def _read(self) -> float:
        now = self._now()
        if self._num_running and not self._num_pauses:
            self._shared_s += (now - self._at) / self._num_running
        self._at = now
        return self._shared_s


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

    def __init__(
        self,
        connect: Connect,
        attempts: int,
        name: str,
        timeout_s: float,
        seats: Seats,
        charge: Callable[[Sender, str | None, float], None],
    ) -> None:
        """
        Args:
            name: names the engine in messages.
            timeout_s: longest wait for the gate to open, and for the requests that have passed it.
            charge: called after each request with its sender, its adapter and its share of the engine's time in
                seconds.
        """
        super().__init__(connect, attempts)
        self._timeout_s = timeout_s
        self.seats = seats
        self.in_use: Counter[str | None] = Counter()
        """Number of requests that run or wait, by adapter."""
        self.closed = Hold(f"the {name} to take requests again")
        self._inside = Hold("requests of the previous policy to end")
        self.shared_time = SharedTime()
        self._charge = charge

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
                charge = partial(self._charge, request.sender, request.adapter)
                with self._inside.held(), self.shared_time.taken(charge):
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


class EngineHandle:
    """Runs the engine process of one base model, and puts the engine to sleep."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        config: ServerConfig,
        seats: Seats,
        charge: Callable[[Sender, str | None, float], None],
        make_process: MakeProcess = ChildProcess,
    ) -> None:
        """
        Args:
            initialise: loads the base model and the adapters into a new process.
            seats: bounds what the engine computes at once.
            charge: see `GatedEngine`.
        """
        self._may_start = asyncio.Event()
        """Clear while the trainer uses the memory of a sleeping engine: a new engine would find none."""
        self._may_start.set()
        self.process = make_process(spec, initialise, self._may_start)
        attempts = CALL_ATTEMPTS
        self.engine = GatedEngine(
            lambda: self.process.connect(), attempts, spec.name, config.job_timeout_s, seats, charge
        )
        self.known_info: EngineInfo | None = None
        """What `info` returned; `None` before its first call."""
        self._sleep = Hold(f"the {spec.name} to wake up")
        self._paused_s = 0.0
        """Seconds for which requests that had passed the gate were paused by its sleep."""

    @property
    def asleep_s(self) -> float:
        """Seconds for which the engine has slept so far."""
        return self._sleep.total_s

    @property
    def busy_s(self) -> float:
        """Seconds for which the engine has computed at least one request so far."""
        return self.engine.sampling_s - self._paused_s

    async def info(self) -> EngineInfo:
        if self.known_info is None:
            self.known_info = await self.engine.info()
        return self.known_info

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Let the engine sleep during the body. If it dies meanwhile, it starts again, awake, after the body."""
        before_s = self.engine.sampling_s
        try:
            with self._sleep.held(), self.engine.shared_time.paused():
                await self.engine.sleep()
                self._may_start.clear()
                yield
        finally:
            self._may_start.set()
            await self._wake()
            self._paused_s += self.engine.sampling_s - before_s

    async def _wake(self) -> None:
        client = self.process.live_client
        if client is None:  # it died, and will be awake when it is back
            return
        try:
            await client.call(Wake())
        except ProcessError as error:
            if not client.closed:  # it may have taken back only a part of its memory
                await self.process.end(f"it did not wake up: {error.message.splitlines()[0]}")
