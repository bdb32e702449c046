"""The engine of one base model, seen from the server: its processes (replicas), and the gate before them.

    request --> seat? --> closed? --> which replica? --> answer
                  |         |              |
                  |         |            one that has proved the policy (`EngineReplica`), by the rule of `Router`
                  |       new requests wait here while the engine sleeps or exchanges its weights
                requests wait here for their turn (`Seats`)

Each replica has all weights and serves by itself. One that dies is started again, and its requests go on at another.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from art.config.server import CALL_ATTEMPTS
from art.engine import EngineInfo, GenerateRequest, Sender, Timings, TokenChunk
from art.engines.routing import Router
from art.errors import ArtError, OverloadedError, ProcessError
from art.protocol.calls import Wake
from art.protocol.live import ProcessState
from art.protocol.rpc import RpcClient
from art.runtime.hosting.process_engine import ProcessEngine
from art.worker.process import ChildProcess, ChildSpec, MakeProcess
from art.worker.waits import BusyPeriod

T = TypeVar("T")

MAX_WAITING = 4096
"""Requests of one project that may wait for an engine."""


class Seats:
    """Hands out the seats of one engine. It belongs to one event loop.

    A seat is one completion that the engine computes, so a request with `n=4` needs four. A free seat goes to the
    project with the fewest seats, in it to the key with the fewest seats, and of its requests to the oldest.
    """

    def __init__(self, num_seats: int, max_waiting: int = MAX_WAITING) -> None:
        """`max_waiting` bounds the requests of one project that wait."""
        self._num_seats = num_seats
        self._max_waiting = max_waiting
        self._held: Counter[Sender] = Counter()
        self._queues: dict[Sender, dict[asyncio.Future[None], None]] = {}
        """The turns of waiting requests, oldest first. The sender that had its turn longest ago is first."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def resize(self, num_seats: int) -> None:
        """Change the number of seats. Taken seats stay taken."""
        self._num_seats = num_seats
        self._fill()

    @asynccontextmanager
    async def taken(self, sender: Sender) -> AsyncGenerator[None]:
        """Wait for a seat, and hold it during the body. Raises `OverloadedError` if too many requests of the project
        wait already."""
        if self._queues or self._held.total() >= self._num_seats:
            await self._wait(sender)
        else:
            self._held[sender] += 1
        try:
            yield
        finally:
            self._give_back(sender)

    async def _wait(self, sender: Sender) -> None:
        num_waiting = sum(len(queue) for (name, _), queue in self._queues.items() if name == sender[0])
        if num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{num_waiting} requests of project {sender[0]} wait for the engine, which is the limit; try later"
            )
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(sender, {})[turn] = None
        self._fill()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(sender, turn)
            else:  # it was given its seat just before its client hung up
                self._give_back(sender)
            raise

    def _fill(self) -> None:
        """Give free seats to waiting requests."""
        while self._queues and self._held.total() < self._num_seats:
            by_project: Counter[str] = Counter()
            for (project, _), count in self._held.items():
                by_project[project] += count
            sender = min(self._queues, key=lambda sender: (by_project[sender[0]], self._held[sender]))
            turn = next(iter(self._queues[sender]))
            self._leave(sender, turn)
            if not turn.cancelled():  # its client has hung up, which its task has not noticed yet
                self._held[sender] += 1
                turn.set_result(None)

    def _leave(self, sender: Sender, turn: asyncio.Future[None]) -> None:
        """Take a turn out of its queue, and the queue after those of other senders."""
        if queue := self._queues.pop(sender, None):
            queue.pop(turn, None)
            if queue:
                self._queues[sender] = queue

    def _give_back(self, sender: Sender) -> None:
        self._held[sender] -= 1
        if not self._held[sender]:
            del self._held[sender]
        self._fill()


class ProvedWeights(NamedTuple):
    """Weights of an adapter. A step that failed and was trained again has other weights under the same path."""

    checkpoint: Path
    identity: str
    is_full: bool


class EngineReplica:
    """One engine process of a base model, and the policies that it was proved to serve."""

    def __init__(
        self,
        number: int,
        num_seats: int,
        spec: ChildSpec,
        initialise: Callable[[EngineReplica, RpcClient], Awaitable[None]],
        may_start: asyncio.Event,
        make_process: MakeProcess,
    ) -> None:
        self.number = number
        """Its place among the replicas, from 0."""
        self.num_seats = num_seats
        """Requests that it computes at once."""
        self.process = make_process(spec, lambda client: initialise(self, client), may_start)
        self.engine = ProcessEngine(self.process.connect, CALL_ATTEMPTS)
        self.proved: dict[str, ProvedWeights] = {}
        """Adapters whose handshake its present process has passed. It gets requests for these only."""
        self.refused: dict[str, str] = {}
        """Adapters that it does not serve though another replica does, and why."""

    @property
    def num_requests(self) -> int:
        """Requests that it computes now."""
        client = self.process.live_client
        return 0 if client is None else client.num_calls

    @property
    def policies(self) -> list[str]:
        """The adapters that it serves now."""
        return [] if self.process.live_client is None else list(self.proved)

    @property
    def status(self) -> dict[str, Any]:
        return {
            "name": self.process.spec.name, "place": self.process.spec.place, **self.process.status,
            "requests": self.num_requests, "policies": self.policies, "refused": self.refused,
        }  # fmt: skip


class GatedEngine(ProcessEngine):
    """The replicas of one engine, and a gate before them. Calls that sample or score tokens wait while `closed`
    lasts."""

    def __init__(
        self,
        name: str,
        specs: Sequence[ChildSpec],
        initialise: Callable[[EngineReplica, RpcClient], Awaitable[None]],
        num_seats: int,
        make_process: MakeProcess = ChildProcess,
    ) -> None:
        """
        Args:
            specs: one for each replica.
            initialise: loads the base model and the adapters into the new process of a replica.
            num_seats: number of requests that a replica computes at once.
        """
        self._may_start = asyncio.Event()
        """Clear while the trainer uses the memory of a sleeping engine: a new process would find none."""
        self._may_start.set()
        self.name = name

        async def join(replica: EngineReplica, client: RpcClient) -> None:
            self._router.forget(replica.number)
            await initialise(replica, client)
            self._count_seats([*self.up, replica])

        self.replicas = [
            EngineReplica(number, num_seats, spec, join, self._may_start, make_process)
            for number, spec in enumerate(specs)
        ]
        super().__init__(self.connect, CALL_ATTEMPTS)
        self._router = Router(len(specs))
        self.seats = Seats(num_seats * len(specs))
        self.in_use: Counter[str | None] = Counter()
        """Number of requests that run or wait, by adapter."""
        self.closed = BusyPeriod(f"the {name} to take requests again")
        self._inside = BusyPeriod("requests of the previous policy to end")
        self._paused_s = 0.0
        """Seconds for which requests that had passed the gate were paused by its sleep."""
        self.known_info: EngineInfo | None = None
        """What `info` returned; `None` before its first call."""

    # -- its replicas --

    @property
    def up(self) -> list[EngineReplica]:
        """The replicas that answer now."""
        return [replica for replica in self.replicas if replica.process.live_client is not None]

    @property
    def state(self) -> ProcessState:
        """`up` if a replica is, else `starting` if one is, else `failed`."""
        states = {replica.process.status["state"] for replica in self.replicas}
        return "up" if "up" in states else "starting" if "starting" in states else "failed"

    def start(self) -> None:
        """Begin to start the replicas, except those that have failed. Does not wait."""
        for replica in self.replicas:
            if not replica.process.has_failed:
                replica.process.start()

    async def connect(self) -> RpcClient:
        """Wait until a replica is up, and return the connection to one. Raises what `ChildProcess.connect` does if none
        can be."""
        return await first_connection(self.up[:1] or self.replicas)

    def _connect_for(self, adapter: str | None, token_ids: list[int]) -> Awaitable[RpcClient]:
        if len(self.replicas) == 1:
            return self.replicas[0].process.connect()
        return self._choose(adapter, token_ids)

    async def _choose(self, adapter: str | None, token_ids: list[int]) -> RpcClient:
        """Choose one of the replicas that have proved the adapter. While there are none, wait for those that start."""
        while True:
            up = self.up
            able = [one for one in up if adapter is None or adapter in one.proved]
            if able or len(up) == len(self.replicas):
                break
            try:
                await first_connection([one for one in self.replicas if one not in up])
            except ArtError:
                if not up:
                    raise
                break  # those that are up say that they do not have the adapter
        self._count_seats(up)
        for replica in up:
            self._router.running[replica.number] = replica.num_requests
            self._router.room[replica.number] = replica.num_seats
        number = self._router.choose(adapter, token_ids, [replica.number for replica in able or up])
        return await self.replicas[number].process.connect()

    def _count_seats(self, up: list[EngineReplica]) -> None:
        """Let as many requests through as the replicas that are up compute at once."""
        self.seats.resize(sum(replica.num_seats for replica in up))

    # -- its gate --

    @property
    def busy_s(self) -> float:
        """Seconds for which the engine has computed at least one request so far."""
        return self._inside.total_s - self._paused_s

    async def info(self) -> EngineInfo:
        if self.known_info is None:
            self.known_info = await super().info()
        return self.known_info

    async def until_empty(self) -> None:
        """Wait until all requests that have passed the gate have ended. Raises `ProcessError` if that took longer than
        a job may take."""
        await self._inside.until_ended()

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
                await self.closed.until_ended()
                with self._inside.held():
                    yield time.perf_counter() - arrived
        finally:
            self.in_use[request.adapter] -= 1

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        await self.closed.until_ended()
        with self._inside.held():
            return await super().score(token_ids, adapter)

    async def stats(self) -> dict[str, float]:
        """The numbers of all replicas together. Requests that wait for a seat are among the waiting ones."""
        by_replica = await all_of(replica.engine.stats() for replica in self.up or self.replicas)
        stats = {name: sum(one[name] for one in by_replica) for name in by_replica[0]}
        if "kv_cache_usage" in stats:
            stats["kv_cache_usage"] /= len(by_replica)
        adapters = max(one["adapters"] for one in by_replica)
        return {**stats, "adapters": adapters, "waiting": stats["waiting"] + self.seats.num_waiting}

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Let all replicas sleep during the body. One that dies meanwhile starts again, awake, after the body."""
        before_s = self._inside.total_s
        try:
            await all_of(replica.engine.sleep() for replica in self.replicas)
            self._may_start.clear()
            yield
        finally:
            asleep = [(one.process, one.process.live_client) for one in self.replicas]  # those that died will be awake
            self._may_start.set()
            await all_of(_wake(process, client) for process, client in asleep if client is not None)
            self._paused_s += self._inside.total_s - before_s


async def _wake(process: ChildProcess, client: RpcClient) -> None:
    try:
        await client.call(Wake())
    except ProcessError as error:
        if not client.closed:  # it may have taken back only a part of its memory
            await process.end(f"it did not wake up: {error.message.splitlines()[0]}")


async def first_connection(replicas: Sequence[EngineReplica]) -> RpcClient:
    """Wait for the first replica that is up. Raises what `ChildProcess.connect` does if none comes up."""
    if len(replicas) == 1:
        return await replicas[0].process.connect()
    attempts = [asyncio.ensure_future(replica.process.connect()) for replica in replicas]
    try:
        for number, attempt in enumerate(asyncio.as_completed(attempts), 1):
            try:
                return await attempt
            except ArtError:
                if number == len(attempts):
                    raise
        raise AssertionError("unreachable")
    finally:
        for one in attempts:
            one.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Make calls at once, and wait until all have ended. Then the first error is raised, if there was one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _with_wait(chunk: TokenChunk, timings: Timings, waited_s: float) -> TokenChunk:
    """Count the wait at the gate as a part of the wait for the engine."""
    if timings.queue_s is None:
        return chunk
    return replace(chunk, timings=replace(timings, queue_s=timings.queue_s + waited_s))
