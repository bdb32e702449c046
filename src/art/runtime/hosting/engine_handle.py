"""The engine of one base model, seen from the server: its process and its sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from art.config import ServerConfig
from art.engine import EngineInfo
from art.errors import ProcessError
from art.protocol.calls import Wake
from art.protocol.rpc import RpcClient
from art.runtime.hosting.gate import GatedEngine, Hold
from art.runtime.hosting.seats import Seats
from art.runtime.supervision.process import ChildProcess, ChildSpec


class EngineHandle:
    """Runs the engine process of one base model, and puts the engine to sleep."""

    def __init__(
        self, spec: ChildSpec, initialise: Callable[[RpcClient], Awaitable[None]], config: ServerConfig, seats: Seats
    ) -> None:
        """
        Args:
            initialise: loads the base model and the adapters into a new process.
            seats: bounds what the engine computes at once.
        """
        self._may_start = asyncio.Event()
        """Clear while the trainer uses the memory of a sleeping engine: a new engine would find none."""
        self._may_start.set()
        self.process = ChildProcess(spec, initialise, self._may_start)
        attempts = config.restarts.call_attempts
        self.engine = GatedEngine(lambda: self.process.connect(), attempts, spec.name, config.job_timeout_s, seats)
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
