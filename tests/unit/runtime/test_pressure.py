"""How busy an engine is for a project: what its requests hold and wait for, at the seats and inside the engine."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from art.errors import ProcessError
from art.protocol.answers import EnginePressure
from art.runtime.hosting.handles import BusyPeriod, Seats
from art.runtime.models import engine_pressure


class Engine:
    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.closed = BusyPeriod("the engine to take requests again")
        self.inside_waiting = 0.0
        self.more: dict[str, float] = {}
        self.error: Exception | None = None

    async def stats(self) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        return {"waiting": self.inside_waiting + self.seats.num_waiting, **self.more}


class Bench:
    def __init__(self) -> None:
        self.engine = Engine(Seats(8, 100))
        self.state = "up"
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send(self, project: str, count: int) -> None:
        self._tasks += [asyncio.create_task(self._request(project)) for _ in range(count)]
        for _ in range(3):
            await asyncio.sleep(0)

    async def _request(self, project: str) -> None:
        async with self.engine.seats.taken((project, "key")):
            await asyncio.Event().wait()

    async def ask(self, project: str) -> EnginePressure:
        host: Any = SimpleNamespace(engine=self.engine, engine_process=SimpleNamespace(status={"state": self.state}))
        return await engine_pressure(host, project)


async def test_an_idle_engine() -> None:
    async with Bench() as bench:
        assert await bench.ask("shop") == EnginePressure(running=0, waiting=0, seats=8)


async def test_requests_that_run_and_wait_for_a_seat() -> None:
    async with Bench() as bench:
        await bench.send("shop", 11)
        assert await bench.ask("shop") == EnginePressure(running=8, waiting=3, seats=8)


async def test_a_project_sees_the_seats_that_others_leave_it() -> None:
    async with Bench() as bench:
        await bench.send("other", 6)
        await bench.send("shop", 1)
        assert await bench.ask("shop") == EnginePressure(running=1, waiting=0, seats=2)
        assert await bench.ask("third") == EnginePressure(running=0, waiting=0, seats=1)


async def test_requests_that_wait_inside_the_engine_are_shared_out_by_seats() -> None:
    async with Bench() as bench:
        await bench.send("other", 2)
        await bench.send("shop", 6)
        bench.engine.inside_waiting = 4.0  # their memory does not fit; the engine does not know whose they are
        bench.engine.more = {"kv_cache_usage": 0.97}
        assert await bench.ask("shop") == EnginePressure(running=3, waiting=3, seats=6, kv_used_share=0.97)


async def test_an_engine_that_sleeps_or_is_away_says_so() -> None:
    async with Bench() as bench:
        with bench.engine.closed.held():
            assert (await bench.ask("shop")).asleep
        assert not (await bench.ask("shop")).asleep
        bench.state = "starting"
        assert (await bench.ask("shop")).asleep
        bench.state = "up"
        bench.engine.error = ProcessError("it died")
        assert (await bench.ask("shop")).asleep


async def test_a_model_that_is_unknown_is_an_error(tmp_path: Any) -> None:
    from art.errors import NotFoundError
    from art.runtime.models import Models

    models = Models(tmp_path, SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    with contextlib.suppress(NotFoundError):
        await models.pressure("shop", "agent")
        raise AssertionError("it was found")
