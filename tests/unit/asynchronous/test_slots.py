"""The slots of rollouts: their order, and who gives one back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from art.asynchronous.flow import STARTS_PER_TURN, Slots


class Rollouts:
    """Rollouts that hold their slots until a test ends them."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.started: list[tuple[int, int]] = []
        self.tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ends: dict[tuple[int, int], asyncio.Event] = {}

    async def begin(self, *orders: tuple[int, int]) -> None:
        for order in orders:
            self._ends[order] = asyncio.Event()
            self.tasks[order] = asyncio.create_task(self._run(order))
        await settle()

    async def _run(self, order: tuple[int, int]) -> None:
        async with self.slots.slot(order):
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
    bench = Rollouts(Slots(limit))
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
        assert bench.slots.num_running == 1


async def test_a_number_is_never_exceeded_and_none_is_no_limit() -> None:
    async with rollouts(3) as bench:
        await bench.begin(*((group, 0) for group in range(5)))
        assert (bench.slots.num_running, len(bench.started)) == (3, 3)
    async with rollouts(None) as bench:
        await bench.begin(*((group, 0) for group in range(500)))
        assert bench.slots.num_running <= 6 * STARTS_PER_TURN, "a share of them in each turn"
        for _ in range(10):
            await settle()
        assert bench.slots.num_running == 500
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
        assert bench.slots.num_running == 1


async def test_a_rollout_that_is_cancelled_just_as_it_gets_its_slot_gives_it_back() -> None:
    async with rollouts(1) as bench:
        await bench.begin((0, 0), (1, 0), (2, 0))
        bench._ends[0, 0].set()
        await asyncio.sleep(0)
        bench.tasks[1, 0].cancel()
        await settle()
        assert bench.started in ([(0, 0), (2, 0)], [(0, 0), (1, 0), (2, 0)])
        assert bench.slots.num_running == 1
        await bench.end((2, 0))
        assert bench.slots.num_running == 0
