"""A supervised process without a process: those who connect talk to a fake engine, or to a trainer that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from art.errors import ProcessError
from art.protocol import calls
from art.protocol.samples import StepResult
from art.worker.process import ChildProcess, MakeProcess
from tests.support.fake_engine import FakeEngine


class Connection:
    """A connection to both, which writes down what it is asked."""

    closed = False

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = FakeEngine() if engine is None else engine
        self.made: list[str] = []
        """Each call: its method, and the adapter that it names."""
        self.deadly: tuple[str, ...] = ()
        """Calls under which the process dies."""
        self.finish_step = asyncio.Event()

    def note(self, call: calls.Call[Any]) -> None:
        name = getattr(call, "name", None)
        name = call.request.adapter if isinstance(call, calls.Generate) else name
        self.made.append(call.method if name is None else f"{call.method} {name}")
        if call.method in self.deadly:
            raise ProcessError(f"died during {call.method}")

    async def call(self, call: calls.Call[Any]) -> Any:
        self.note(call)
        match call:
            case calls.LoadAdapter():
                return await self.engine.load_adapter(call.name, call.path)
            case calls.UnloadAdapter():
                return await self.engine.unload_adapter(call.name)
            case calls.Score():
                return await self.engine.score(call.token_ids, call.adapter)
            case calls.Generate():
                return await self.engine.generate_whole(call.request)
            case calls.Sleep():
                return await self.engine.sleep()
            case calls.Wake():
                return await self.engine.wake()
            case calls.Info():
                return await self.engine.info()
        return None

    async def stream(self, call: calls.Call[Any]) -> AsyncIterator[Any]:
        self.note(call)
        if isinstance(call, calls.Generate):
            async for chunk in self.engine.generate(call.request, stream=call.stream):
                yield chunk
        else:
            await self.finish_step.wait()
            yield StepResult(step=1)


class FakeProcess(ChildProcess):
    """Everybody who connects gets the same connection."""

    connection: Any
    ended: list[str]
    """Why it was ended, each time."""

    async def connect(self) -> Any:
        return self.connection

    @property
    def live_client(self) -> Any:
        return self.connection

    def start(self) -> None:
        return

    async def end(self, cause: str) -> None:
        self.ended.append(cause)


def processes_with(connection: Any) -> MakeProcess:
    def make(*args: Any) -> FakeProcess:
        process = FakeProcess(*args)
        process.connection, process.ended = connection, []
        return process

    return make
