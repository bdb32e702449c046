"""The queue in which projects and keys take turns at an engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from art.engine import Sender
from art.errors import OverloadedError
from art.runtime.hosting.gated_engine import Seats

A, B, C = ("a", "key"), ("b", "key"), ("c", "key")


class Requests:
    """Requests that hold their seats until a test ends them."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.seated: list[tuple[Sender, int]] = []
        """Sender and number of each request that got a seat, in that order."""
        self._ends: dict[tuple[Sender, int], asyncio.Event] = {}
        self._tasks: dict[tuple[Sender, int], asyncio.Task[None]] = {}
        self._sent: Counter[Sender] = Counter()

    async def send(self, sender: Sender, count: int = 1) -> None:
        for _ in range(count):
            self._sent[sender] += 1
            request = sender, self._sent[sender]
            self._tasks[request] = asyncio.create_task(self._run(request))
        await self.settle()

    async def _run(self, request: tuple[Sender, int]) -> None:
        async with self.seats.taken(request[0]):
            self.seated.append(request)
            self._ends[request] = asyncio.Event()
            await self._ends[request].wait()

    async def end(self, *requests: tuple[Sender, int]) -> None:
        for request in requests:
            self._ends.pop(request).set()
            await self.settle()

    async def hang_up(self, *requests: tuple[Sender, int]) -> None:
        for request in requests:
            self._tasks[request].cancel()
            self._ends.pop(request, None)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def running(self) -> Counter[Sender]:
        return Counter(sender for sender, _ in self._ends)

    def numbers(self, sender: Sender) -> list[int]:
        return [number for one, number in self.seated if one == sender]

    def error_of(self, request: tuple[Sender, int]) -> BaseException | None:
        return self._tasks[request].exception() if self._tasks[request].done() else None


async def test_one_key_fills_the_seats_and_its_requests_run_in_order() -> None:
    requests = Requests(Seats(4, max_waiting=100))
    await requests.send(A, 10)
    assert requests.numbers(A) == [1, 2, 3, 4]
    assert requests.seats.num_waiting == 6
    await requests.end((A, 3), (A, 1))
    assert requests.numbers(A) == [1, 2, 3, 4, 5, 6]


async def test_a_newcomer_gets_the_next_free_seat_beside_a_flood() -> None:
    requests = Requests(Seats(8, max_waiting=10_000))
    await requests.send(A, 5000)
    await requests.send(B)
    await requests.send(("a", "other"))
    await requests.end((A, 1), (A, 2))
    assert requests.running() == {A: 6, B: 1, ("a", "other"): 1}


async def test_projects_that_flood_end_up_with_equally_many_seats() -> None:
    requests = Requests(Seats(12, max_waiting=10_000))
    await requests.send(A, 1000)
    await requests.send(B, 500)
    await requests.send(("b", "second"), 500)
    rng = random.Random(0)
    for _ in range(200):
        await requests.end(rng.choice(list(requests._ends)))
    running = requests.running()
    assert running.total() == 12
    by_project = Counter({project: sum(n for (p, _), n in running.items() if p == project) for project in "ab"})
    assert abs(by_project["a"] - by_project["b"]) <= 1
    assert abs(running[B] - running["b", "second"]) <= 1


async def test_equal_projects_take_turns() -> None:
    requests = Requests(Seats(1, max_waiting=100))
    for sender in (A, B, C):
        await requests.send(sender, 3)
    for _ in range(6):
        await requests.end(next(iter(requests._ends)))
    assert [sender[0] for sender, _ in requests.seated] == ["a", "a", "b", "c", "a", "b", "c"]


async def test_a_request_whose_client_hangs_up_leaves_the_queue() -> None:
    requests = Requests(Seats(1, max_waiting=3))
    await requests.send(A, 4)
    await requests.hang_up((A, 2), (A, 3))
    assert requests.seats.num_waiting == 1
    await requests.send(A, 2)  # there is room for two again
    assert requests.seats.num_waiting == 3
    await requests.end((A, 1))
    assert requests.numbers(A) == [1, 4]


async def test_a_seat_that_was_given_to_a_client_that_hangs_up_goes_to_the_next() -> None:
    requests = Requests(Seats(1, max_waiting=10))
    await requests.send(A, 3)
    requests._ends.pop((A, 1)).set()
    while requests.seats.num_waiting == 2:  # until the seat is given, before its task runs
        await asyncio.sleep(0)
    await requests.hang_up((A, 2))
    assert requests.numbers(A) == [1, 3]


async def test_a_seat_is_given_beside_clients_that_are_hanging_up_now() -> None:
    requests = Requests(Seats(1, max_waiting=10))
    await requests.send(A, 2)
    requests._tasks[A, 2].cancel()  # its task has not noticed yet
    requests._ends.pop((A, 1)).set()
    await requests.settle()
    assert requests.numbers(A) == [1]
    assert requests.seats.num_waiting == 0
    await requests.send(A)
    assert requests.numbers(A) == [1, 3]


async def test_each_project_has_a_queue_of_its_own() -> None:
    requests = Requests(Seats(1, max_waiting=2))
    await requests.send(A, 4)
    error = requests.error_of((A, 4))
    assert isinstance(error, OverloadedError)
    assert "2 requests of project a wait" in error.message
    await requests.send(B, 2)
    assert requests.running() == {A: 1}
    assert requests.error_of((B, 2)) is None


async def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    requests = Requests(Seats(2, max_waiting=3))
    for project in range(20):
        await requests.send((f"p{project}", "key"), 3)
    while requests._ends:
        await requests.end(next(iter(requests._ends)))
    assert (requests.seats._held, requests.seats._queues) == ({}, {})
    await requests.send(A, 3)
    assert requests.running() == {A: 2}


async def test_an_engine_that_has_started_says_how_many_seats_it_has() -> None:
    seats = Seats(1, 10)
    inside: list[int] = []
    end = asyncio.Event()

    async def sit(number: int) -> None:
        async with seats.taken(("p", "key")):
            inside.append(number)
            await end.wait()

    tasks = [asyncio.create_task(sit(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert inside == [0]
    seats.resize(4)
    await asyncio.sleep(0.01)
    assert inside == [0, 1, 2, 3]
    seats.resize(2)
    end.set()
    await asyncio.gather(*tasks)
    assert inside == [0, 1, 2, 3, 4, 5]
