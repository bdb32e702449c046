"""The limiter of rollouts: its order, and how "auto" follows the load of an engine, in a simulation of both."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import pytest

from art.asynchronous import concurrency
from art.asynchronous.concurrency import HIGHEST, LOWEST, STARTS_PER_TURN, Concurrency, SlotController
from art.errors import ConfigError, NotFoundError
from art.protocol.answers import EnginePressure


class Rollouts:
    """Rollouts that hold their slots until a test ends them."""

    def __init__(self, limiter: Concurrency) -> None:
        self.limiter = limiter
        self.started: list[tuple[int, int]] = []
        self.tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ends: dict[tuple[int, int], asyncio.Event] = {}

    async def begin(self, *orders: tuple[int, int]) -> None:
        for order in orders:
            self._ends[order] = asyncio.Event()
            self.tasks[order] = asyncio.create_task(self._run(order))
        await settle()

    async def _run(self, order: tuple[int, int]) -> None:
        async with self.limiter.slot(order):
            self.started.append(order)
            await self._ends[order].wait()

    async def end(self, *orders: tuple[int, int]) -> None:
        for order in orders:
            self._ends[order].set()
        await settle()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@asynccontextmanager
async def rollouts(limit: int | None) -> AsyncIterator[Rollouts]:
    bench = Rollouts(Concurrency(limit))
    try:
        yield bench
    finally:
        await bench.close()


async def test_the_oldest_group_is_next() -> None:
    async with rollouts(1) as bench:
        await bench.begin((3, 0))
        await bench.begin((7, 1), (5, 0), (2, 4), (2, 1))
        assert bench.started == [(3, 0)]
        for order in [(3, 0), (2, 1), (2, 4), (5, 0)]:
            await bench.end(order)
        assert bench.started == [(3, 0), (2, 1), (2, 4), (5, 0), (7, 1)]
        assert (bench.limiter.num_running, bench.limiter.num_waiting) == (1, 0)


async def test_a_number_is_never_exceeded_and_none_is_no_limit() -> None:
    async with rollouts(3) as bench:
        await bench.begin(*((group, 0) for group in range(5)))
        assert (bench.limiter.num_running, bench.limiter.num_waiting) == (3, 2)
    async with rollouts(None) as bench:
        await bench.begin(*((group, 0) for group in range(500)))
        assert bench.limiter.num_running <= 6 * STARTS_PER_TURN, "a share of them in each turn"
        for _ in range(10):
            await settle()
        assert (bench.limiter.num_running, bench.limiter.limit) == (500, None)
        assert bench.started == [(group, 0) for group in range(500)]


async def test_a_rollout_that_is_cancelled_takes_no_slot() -> None:
    async with rollouts(1) as bench:
        await bench.begin((0, 0), (1, 0), (2, 0))
        bench.tasks[1, 0].cancel()  # while it waits
        await settle()
        bench.tasks[0, 0].cancel()  # while it runs
        await settle()
        assert bench.started == [(0, 0), (2, 0)]
        await bench.begin((3, 0))
        await bench.end((2, 0))
        assert bench.limiter.num_running == 1


async def test_a_rollout_that_is_cancelled_just_as_it_gets_its_slot_gives_it_back() -> None:
    async with rollouts(1) as bench:
        await bench.begin((0, 0), (1, 0), (2, 0))
        bench._ends[0, 0].set()
        await asyncio.sleep(0)
        bench.tasks[1, 0].cancel()
        await settle()
        assert bench.started in ([(0, 0), (2, 0)], [(0, 0), (1, 0), (2, 0)])
        assert bench.limiter.num_running == 1
        await bench.end((2, 0))
        assert bench.limiter.num_running == 0


def test_settings_that_cannot_be_honoured() -> None:
    with pytest.raises(ConfigError, match="follows the load of the engine"):
        Concurrency("auto")
    with pytest.raises(ConfigError, match="at least 1"):
        Concurrency(0)


async def test_auto_asks_the_engine_and_tells_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "POLL_S", 0.001)
    answers: list[EnginePressure | Exception] = [
        EnginePressure(running=0, waiting=0, seats=8),
        NotFoundError("an older server"),
        EnginePressure(running=8, waiting=24, seats=8),
    ]

    async def ask() -> EnginePressure:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    limiter = Concurrency("auto", ask)
    bench = Rollouts(limiter)
    polling = asyncio.create_task(limiter.run())
    await bench.begin(*((group, 0) for group in range(20)))
    async with asyncio.timeout(60):
        while limiter.limit != LOWEST:
            await asyncio.sleep(0.001)
    assert limiter.limit == LOWEST  # each rollout has two requests and more at an engine with 8 seats
    assert len(bench.started) in (8, 20)  # eight, unless they began before the first answer
    metrics = limiter.metrics()
    assert metrics["pipeline/engine_seats_used_share"] == pytest.approx(1, abs=0.5)
    assert metrics["pipeline/engine_waiting_mean"] > 10
    assert limiter.metrics()["pipeline/concurrency_limit"] == LOWEST
    polling.cancel()
    with suppress(asyncio.CancelledError):
        await polling
    await bench.close()


async def test_a_fixed_limit_asks_nobody() -> None:
    await asyncio.wait_for(Concurrency(4).run(), 60)
    assert "pipeline/engine_seats_used_share" not in Concurrency(4).metrics()


@dataclass
class Agents:
    """A simulated engine, and agents that ask it `turns` times, with tools before each request."""

    seats: int
    tools_s: float
    sample_s: float
    turns: int = 6
    memory: int | None = None
    """Requests whose keys and values fit into the engine, if they are fewer than the seats."""
    boot_s: float = 0.0
    """Every rollout begins with a wait of this time."""
    controller: SlotController = field(default_factory=SlotController)
    seconds: int = 600

    def run(self) -> list[tuple[float, int, int]]:
        """Return limit, requests computed and requests waiting, second by second."""
        rng, now, number = random.Random(0), 0.0, 0
        in_flight = busy = 0
        queue: list[int] = []
        rows: list[tuple[float, int, int]] = []
        events: list[tuple[float, int, Literal["poll", "ask", "answer"], int]] = [(0.0, 0, "poll", 0)]

        def later(seconds: float, kind: Literal["ask", "answer"], turns: int) -> None:
            nonlocal number
            number += 1
            heapq.heappush(events, (now + seconds, number, kind, turns))

        while events[0][0] <= self.seconds:
            now, _, kind, turns = heapq.heappop(events)
            if kind == "poll":
                seen = EnginePressure(running=busy, waiting=len(queue), seats=self.seats)
                self.controller.observe(seen, in_flight)
                rows.append((self.controller.limit, busy, len(queue)))
                heapq.heappush(events, (now + 1, 0, "poll", 0))
            elif kind == "ask":
                queue.append(turns)
            else:
                busy -= 1
                if turns > 1:
                    later(rng.expovariate(1 / self.tools_s), "ask", turns - 1)
                else:
                    in_flight -= 1
                    self.controller.ended(in_flight + 1)
            while queue and busy < min(self.seats, self.memory or self.seats):
                busy += 1
                later(rng.expovariate(1 / self.sample_s), "answer", queue.pop(0))
            while in_flight < int(self.controller.limit):
                in_flight += 1
                later(self.boot_s + rng.expovariate(1 / self.tools_s), "ask", self.turns)
        return rows


def settled(rows: list[tuple[float, int, int]]) -> tuple[float, float, float]:
    """Means over the second half."""
    half = rows[len(rows) // 2 :]
    limit, busy, waiting = (sum(row[i] for row in half) / len(half) for i in range(3))
    return limit, busy, waiting


@pytest.mark.parametrize(
    ("agents", "ideal"),
    [
        (Agents(seats=16, tools_s=0.001, sample_s=2), 16),
        (Agents(seats=16, tools_s=2, sample_s=2), 32),
        (Agents(seats=16, tools_s=10, sample_s=2), 96),
    ],
    ids=["only samples", "half tools", "mostly tools"],
)
def test_the_seats_are_full_however_much_a_rollout_waits_for_tools(agents: Agents, ideal: int) -> None:
    limit, busy, waiting = settled(agents.run())
    assert busy > 0.88 * agents.seats
    assert waiting < 0.4 * agents.seats
    assert 0.8 * ideal < limit < 1.3 * ideal


def test_requests_that_do_not_fit_into_the_memory_bound_it_too() -> None:
    limit, busy, waiting = settled(Agents(seats=64, tools_s=10, sample_s=2, memory=20).run())
    assert busy > 0.9 * 20
    assert waiting < 20
    assert limit < 1.4 * 120


def test_a_long_start_of_every_rollout_does_not_raise_it_without_bound() -> None:
    rows = Agents(seats=16, tools_s=1, sample_s=1, boot_s=60, seconds=400).run()
    assert max(limit for limit, *_ in rows[:60]) <= 16  # no rollout has ended yet
    assert max(limit for limit, *_ in rows) < 1.5 * 190  # 16 seats, 6 of 71 s at the engine


def test_it_falls_when_rollouts_ask_more_often() -> None:
    agents = Agents(seats=16, tools_s=20, sample_s=2)
    before = agents.run()[-1][0]
    agents.tools_s = 2
    after, *_ = settled(agents.run())
    assert before > 100
    assert after < 45


def test_the_growth_is_at_most_one_for_each_rollout_that_ends() -> None:
    controller = SlotController()
    controller.observe(EnginePressure(running=0, waiting=0, seats=8), 0)
    controller.observe(EnginePressure(running=1, waiting=0, seats=8), 8)
    assert controller.target > 60
    for _ in range(5):
        controller.ended(int(controller.limit))
    assert controller.limit == 13
    controller.ended(3)  # the limit does not bind: there are not more rollouts to run
    assert controller.limit == 13


def test_it_holds_while_the_engine_sleeps_and_while_its_memory_is_full() -> None:
    controller = SlotController()
    controller.observe(EnginePressure(running=0, waiting=0, seats=8), 0)
    controller.observe(EnginePressure(running=1, waiting=0, seats=8), 8)
    for seen in (
        EnginePressure(running=0, waiting=8, seats=8, asleep=True),
        EnginePressure(running=1, waiting=0, seats=8, kv_used_share=0.95),
        None,
    ):
        controller.observe(seen, 8)
        controller.ended(int(controller.limit))
        assert controller.limit == 8
    controller.observe(EnginePressure(running=1, waiting=0, seats=8, kv_used_share=0.5), 8)
    controller.ended(8)
    assert controller.limit == 9


def test_it_stays_within_its_bounds() -> None:
    controller = SlotController()
    controller.observe(EnginePressure(running=0, waiting=0, seats=100_000), 0)
    assert controller.limit == HIGHEST
    for _ in range(100):
        controller.observe(EnginePressure(running=1, waiting=100_000, seats=1), 10)
    assert controller.limit == LOWEST
