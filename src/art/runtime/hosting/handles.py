"""Engine and trainer of one base model, seen from the server.

The engine has a gate before it. Requests wait there while it sleeps or exchanges its weights, and for their turn.

    request --> seat? --> closed? --> engine --> answer
                  |         |
                  |       new requests wait here until it is open
                requests wait here for their turn (`Seats`)

The trainer takes one call at a time, which is repeated if the process dies. The samples of a call go to it as a file,
which is written once, read again by each attempt, and deleted after the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from art.config import LoraConfig
from art.config.server import CALL_ATTEMPTS, JOB_TIMEOUT_S
from art.engine import EngineInfo, GenerateRequest, Sender, Timings, TokenChunk
from art.errors import JobCancelledError, OverloadedError, ProcessError, TrainingError
from art.protocol.calls import (
    Call,
    InitCheckpoint,
    Progress,
    SampleCall,
    Train,
    TrainSft,
    Trial,
    Wake,
    WriteLoudAdapters,
)
from art.protocol.rpc import RpcClient, retry_on_process_death
from art.protocol.samples import StepResult, TrainingSample
from art.runtime.hosting.process_engine import ProcessEngine
from art.storage.atomic import storage_errors
from art.worker.process import ChildProcess, ChildSpec, MakeProcess
from art.worker.waits import acquired, waiting

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


class BusyPeriod:
    """A period lasts while at least one `with period.held()` block runs. Others can wait for its end."""

    def __init__(self, end: str) -> None:
        """`end` describes its end, in messages about waiting for it."""
        self._end = end
        self._num_holders = 0
        self._ended = asyncio.Event()
        self._began = 0.0
        self._total_s = 0.0

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

    async def until_ended(self, timeout_s: float = JOB_TIMEOUT_S) -> None:
        """Wait until no `held` block runs. Raises `ProcessError` if it lasted longer than `timeout_s`."""
        while self.lasts:
            async with waiting(self._end, timeout_s):
                await self._ended.wait()


class GatedEngine(ProcessEngine):
    """The engine process of one base model, and a gate before it: calls that sample or score tokens wait while `closed`
    lasts."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        seats: Seats,
        make_process: MakeProcess = ChildProcess,
    ) -> None:
        """`initialise` loads the base model and the adapters into a new process."""
        self._may_start = asyncio.Event()
        """Clear while the trainer uses the memory of a sleeping engine: a new engine would find none."""
        self._may_start.set()
        self.process = make_process(spec, initialise, self._may_start)
        super().__init__(lambda: self.process.connect(), CALL_ATTEMPTS)
        self.seats = seats
        self.in_use: Counter[str | None] = Counter()
        """Number of requests that run or wait, by adapter."""
        self.closed = BusyPeriod(f"the {spec.name} to take requests again")
        self._inside = BusyPeriod("requests of the previous policy to end")
        self._paused_s = 0.0
        """Seconds for which requests that had passed the gate were paused by its sleep."""
        self.known_info: EngineInfo | None = None
        """What `info` returned; `None` before its first call."""

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
        """The engine's numbers. Requests that wait for a seat are among the waiting ones."""
        stats = await super().stats()
        return {**stats, "waiting": stats["waiting"] + self.seats.num_waiting}

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Let the engine sleep during the body. If it dies meanwhile, it starts again, awake, after the body."""
        before_s = self._inside.total_s
        try:
            await self.sleep()
            self._may_start.clear()
            yield
        finally:
            self._may_start.set()
            client = self.process.live_client
            if client is not None:  # else it died, and will be awake when it is back
                try:
                    await client.call(Wake())
                except ProcessError as error:
                    if not client.closed:  # it may have taken back only a part of its memory
                        await self.process.end(f"it did not wake up: {error.message.splitlines()[0]}")
            self._paused_s += self._inside.total_s - before_s


def _with_wait(chunk: TokenChunk, timings: Timings, waited_s: float) -> TokenChunk:
    """Count the wait at the gate as a part of the wait for the engine."""
    if timings.queue_s is None:
        return chunk
    return replace(chunk, timings=replace(timings, queue_s=timings.queue_s + waited_s))


# -- the trainer --


C = TypeVar("C", bound=SampleCall[Any])
OnProgress = Callable[[int, int], Awaitable[None]]
"""Awaited with the number of micro-batches that are done, and of all."""

STOP_WITHIN_S = 60.0
"""Time from a cancellation until the trainer's process is killed, if it is still in the same micro-batch."""


class TrainerHandle:
    """Sends calls to one trainer process, and repeats a call if the process dies. Only `trial` is not repeated."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        engine_aside: Callable[[], AbstractAsyncContextManager[None]],
        samples: Path,
        make_process: MakeProcess = ChildProcess,
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        """`initialise` loads the base model into a new process, and `engine_aside` frees the device for a training call
        where engine and trainer share it. The samples of the calls under way are files in the folder `samples`."""
        self.process = make_process(spec, initialise, None)
        self._engine_aside = engine_aside
        self._samples = samples
        self._job_timeout_s = job_timeout_s
        self._lock = asyncio.Lock()
        self._work = BusyPeriod(f"the {spec.name} to end its call")
        self._training = BusyPeriod(f"the {spec.name} to end its step")

    @property
    def busy_s(self) -> float:
        """Seconds for which the trainer has worked so far."""
        return self._work.total_s

    @property
    def training_s(self) -> float:
        """Seconds for which the trainer has worked on training steps so far."""
        return self._training.total_s

    async def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> None:
        """Write the checkpoint of step 0; `lora=None` is full fine-tuning."""
        async with self._turn("`init_checkpoint`"):
            await self._run(InitCheckpoint(path=path, lora=lora))

    async def train(
        self, call: Train | TrainSft, *, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None
    ) -> StepResult:
        """Train one step. If the trainer dies, the step starts over from its checkpoint. Once `stop` is set, the call
        ends after the current micro-batch.

        Raises:
            JobCancelledError: `stop` ended the call. A call that was about to end returns instead.
            ProcessError: the trainer died during every attempt.
            TrainingError: the step took longer than `job_timeout_s` seconds.
            DiskFullError, StorageError: the samples cannot be written.
        """
        async with self._written(call) as written, self._turn(f"`{call.method}`"), self._engine_aside():
            with self._training.held():
                return await self._run(written, stop, on_progress)

    async def trial(self, samples: list[TrainingSample], lora: LoraConfig | None) -> dict[str, float]:
        """Measure time, memory and gradient of a step that is thrown away; see `Trainer.trial`. It is not repeated."""
        call = Trial(samples=samples, lora=lora)
        async with self._written(call) as written, self._turn("a trial step"), self._engine_aside():
            return await (await self.process.connect()).call(written)

    async def write_loud_adapters(self, folder: Path, lora: LoraConfig) -> None:
        """Write the test adapters of `lora` into `folder`, a new one; see `Trainer.write_loud_adapters`."""

        async def attempt(client: RpcClient) -> None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # of an attempt that died
            async with asyncio.timeout(self._job_timeout_s):
                await client.call(WriteLoudAdapters(folder=folder, lora=lora))

        async with self._turn("test adapters"):
            await retry_on_process_death(self.process.connect, attempt, "writing test adapters", CALL_ATTEMPTS)

    @asynccontextmanager
    async def _written(self, call: C) -> AsyncIterator[C]:
        """Within the body the samples of a call are a file. Writing it takes a thread, so that requests go on."""
        path = self._samples / f"{uuid.uuid4().hex}.safetensors"

        def write() -> C:
            with storage_errors(path, "writing"):
                path.parent.mkdir(parents=True, exist_ok=True)
                return call.written(path)

        try:
            yield await asyncio.to_thread(write)
        finally:
            with contextlib.suppress(OSError):  # the next server deletes what is left
                await asyncio.to_thread(path.unlink)

    def _turn(self, what: str) -> AbstractAsyncContextManager[None]:
        return acquired(self._lock, f"its turn for {what} in the {self.process.spec.name}", self._job_timeout_s)

    async def _run(
        self,
        call: Call[Progress | StepResult],
        stop: asyncio.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> StepResult:
        """Make a call until it has a result, `stop` ends it, or it takes too long."""

        async def connect() -> RpcClient:
            if stop is not None and stop.is_set():
                raise JobCancelledError(f"`{call.method}` was cancelled")
            return await self.process.connect()

        async def stop_call(client: RpcClient) -> None:
            # To kill the process is safe at any moment: checkpoints are written under a temporary name.
            if stop is not None:
                await stop.wait()
                client.ask_to_stop(call.method)
                await asyncio.sleep(STOP_WITHIN_S)
                await self.process.end(f"`{call.method}` was cancelled and had not stopped after {STOP_WITHIN_S:g} s")

        async def attempt(client: RpcClient) -> StepResult:
            step: StepResult | None = None
            stopping = asyncio.create_task(stop_call(client), name=f"stop-{call.method}")
            try:
                async with asyncio.timeout(self._job_timeout_s):
                    async for result in client.stream(call):
                        if isinstance(result, StepResult):
                            step = result
                        elif on_progress is not None:
                            await on_progress(result.done, result.total)
            except TimeoutError:
                problem = f"`{call.method}` took longer than {self._job_timeout_s:g} s"
                await self.process.end(problem)
                raise TrainingError(f"{problem}; the {self.process.spec.name} was ended") from None
            finally:
                stopping.cancel()
            assert step is not None, "a call that raises nothing ends with its result"
            return step

        with self._work.held():
            return await retry_on_process_death(connect, attempt, f"`{call.method}`", CALL_ATTEMPTS)
