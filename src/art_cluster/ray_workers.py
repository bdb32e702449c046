"""`art.RayWorkers`: rollouts in processes of a Ray cluster.

    async with art.RayWorkers(8, cpus=1) as workers:
        groups = await art.gather_trajectory_groups(pending, workers=workers)

run         waits for a seat in a worker, sends the call there, and gives its result or error back
_fill       which of those that wait get the free seats
_bring_up   starts a worker, and again one in the place of each that has died

When a worker process dies, a rollout that ran alone in it is at fault, and fails. If several ran there, each runs
again, alone in a worker, so that only the one at fault is lost. Ray carries calls and results; requests to the model go
from the worker straight to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from art.client.connections import load_openai
from art.errors import ConfigError, ProcessError, RolloutError
from art.rollout_workers import Call
from art.trajectory import cancel_and_wait, without_time_limit
from art_cluster.connect import connect, describe_room, import_ray
from art_cluster.packed_calls import pack, run_packed, unpack

logger = logging.getLogger(__name__)

VERSION: str = sys.modules["art"].__version__
ROOM_TIMEOUT_S = 5.0
"""Seconds to wait for resources that others hold: those of a pool that was just closed are free a little later."""
START_TIMEOUT_S = 60.0
"""Seconds without any worker after which rollouts that wait for one fail."""
CANCEL_TIMEOUT_S = 10.0
"""Seconds in which a cancelled rollout must end before its worker is killed."""
RESTART_PAUSE_S = 2.0
"""Seconds before the next try after a worker died while it started."""
_open_pools: set[RayWorkers] = set()
_started_ray = False
"""Whether this process started or joined Ray for its pools, and leaves it with the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker tells about itself when it is up."""

    version: str
    pid: int
    host: str
    loopback: str
    """Which processes reach each other at 127.0.0.1: those with the same value."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process, and the process that takes its place when it has died."""

    actor: Any = None
    info: WorkerInfo | None = None
    """`None` while it starts."""
    num_running: int = 0
    is_held: bool = False
    """Whether its rollout runs alone."""
    num_lost: int = 0
    """Rollouts that ran in the process when it last died."""


@dataclass(slots=True, eq=False)
class Seat:
    """A rollout's place in a worker process."""

    worker: Worker
    actor: Any
    info: WorkerInfo
    had_company: bool = False
    """Whether other rollouts ran in the process when it died."""


class RayWorkers:
    """Processes on the nodes of a Ray cluster that run rollouts and other functions. Use it in one event loop."""

    def __init__(
        self,
        num_workers: int,
        *,
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        address: str | None = None,
    ) -> None:
        """
        Args:
            num_workers: number of processes.
            cpus: CPUs that Ray reserves for each. For rollouts that mostly wait a fraction will do.
            resources: further resources of Ray that each needs, such as `{"sandbox": 1}`.
            runtime_env: what Ray installs and sets for them: `{"working_dir": ".", "pip": ["..."], "env_vars": {...}}`.
            concurrency: rollouts that run in one process at once. If a process dies, they all run again, one by one.
            address: the cluster: `host:6379` on a machine of it, `ray://host:10001` from outside, "auto" for the one of
                this machine. By default the variable RAY_ADDRESS, or else a cluster of this machine alone that ends
                with the pool.

        Raises:
            ConfigError: a number is out of range, or Ray is not installed.
        """
        if num_workers < 1 or concurrency < 1 or cpus < 0:
            raise ConfigError(
                "expected num_workers >= 1, concurrency >= 1 and cpus >= 0, "
                f"got {num_workers}, {concurrency} and {cpus}"
            )
        import_ray()
        self.num_workers, self.concurrency, self.address = num_workers, concurrency, address
        self._asks = {name: need for name, need in {"CPU": cpus, **(resources or {})}.items() if need}
        self._runtime_env = dict(runtime_env or {})
        self._workers = [Worker() for _ in range(num_workers)]
        self._opening: asyncio.Task[None] | None = None
        self._starts: dict[Worker, asyncio.Task[None]] = {}
        self._waiting: deque[asyncio.Future[Seat]] = deque()
        self._suspects: deque[asyncio.Future[Seat]] = deque()
        """Rollouts that wait to run alone, because a process died while they ran in it with others."""
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        """Why a worker cannot start. If none can, every rollout fails with it."""
        self._options: dict[str, Any] = {}

    @property
    def num_seats(self) -> int:
        return self.num_workers * self.concurrency

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def check(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Raise a `ConfigError` if workers could not import the function, or an argument cannot be sent."""
        pack(Call(function, args, kwargs))

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in a worker, and return its result or raise its error.

        Judges in `after_each` and sandboxes may use it too. The function is one that workers can import, of the top
        level of a module or of the script. A function that is not async runs in a thread of the worker. Cancelling this
        call cancels an async function.

        Raises:
            ConfigError: the function cannot be imported, or the workers cannot start.
            RolloutError: the process of the worker died while the function ran alone in it.
            ProcessError: no worker is up.
        """
        packed = pack(Call(function, args, kwargs))
        is_suspect = False
        while True:
            with without_time_limit():
                await self._open()
                self._check_addresses(packed.addresses)
                seat = await self._sit(is_suspect)
            died = await self._ask(seat, packed.payload)
            if isinstance(died, bytes):
                return unpack(died)
            if not seat.had_company:
                raise RolloutError(
                    f"the worker process {seat.info.pid} on {seat.info.host} died while this rollout ran alone in it "
                    f"(killed by a signal such as SIGSEGV, out of memory, or its node was lost): {died}"
                )
            is_suspect = True

    async def close(self) -> None:
        """End the workers, and the Ray that was started for them. Rollouts that run in them fail."""
        opening, self._opening = self._opening, None
        await cancel_and_wait([] if opening is None else [opening])
        self._fail_waiting(ProcessError("the workers were closed"))
        await self._end()

    async def _end(self) -> None:
        ray = import_ray()
        await cancel_and_wait(self._starts.values())
        self._starts.clear()
        if ray.is_initialized():
            for worker in self._workers:
                if worker.actor is not None:
                    ray.kill(worker.actor)
        self._workers = [Worker() for _ in range(self.num_workers)]
        _open_pools.discard(self)
        if _started_ray and not _open_pools:
            await asyncio.to_thread(_leave)

    # -- seats --

    @property
    def _has_none(self) -> bool:
        """Whether no worker is up, and none is about to be."""
        return not any(w.info for w in self._workers) and all(start.done() for start in self._starts.values())

    async def _sit(self, is_suspect: bool) -> Seat:
        """Wait for a seat in a worker; a suspect gets a worker of its own."""
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        (self._suspects if is_suspect else self._waiting).append(turn)
        self._fill()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given its seat just before
                self._leave_seat(turn.result().worker)
            raise

    def _fill(self) -> None:
        """Give free seats to those that wait. Workers that suspects need next take no others, and run empty."""
        if self._failure is not None and self._has_none:
            self._fail_waiting(self._failure)
        for waiting, is_suspect in ((self._suspects, True), (self._waiting, False)):
            while waiting:
                if waiting[0].done():
                    waiting.popleft()
                    continue
                up = sorted((w for w in self._workers if w.info and not w.is_held), key=lambda w: w.num_running)
                if not is_suspect:
                    up = up[sum(not turn.done() for turn in self._suspects) :]
                worker = up[0] if up else None
                if worker is None or worker.num_running >= (1 if is_suspect else self.concurrency):
                    break
                assert worker.info is not None
                worker.num_running += 1
                worker.is_held = is_suspect
                waiting.popleft().set_result(Seat(worker, worker.actor, worker.info))

    def _leave_seat(self, worker: Worker) -> None:
        worker.num_running -= 1
        worker.is_held = False
        self._fill()

    async def _ask(self, seat: Seat, payload: bytes) -> bytes | str:
        """Send a call to the worker of the seat. Returns its packed result, or why the process died."""
        ray = import_ray()
        number = next(self._numbers)
        answer = asyncio.ensure_future(_await(seat.actor.call.remote(number, payload)))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            ending = asyncio.create_task(self._cancel(seat, number, answer))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):  # a gather cancels twice
                    await asyncio.wait([ending])
            raise
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            self._lost(seat)
            return " ".join(str(error).split())[:500]
        finally:
            self._leave_seat(seat.worker)

    async def _cancel(self, seat: Seat, number: int, answer: asyncio.Future[bytes]) -> None:
        """Cancel a call, and wait until it has ended. A worker that does not end it in time is killed."""
        seat.actor.cancel.remote(number)
        if not (await asyncio.wait([answer], timeout=CANCEL_TIMEOUT_S))[0]:
            logger.warning("worker %d did not end a cancelled rollout in time and is killed", seat.info.pid)
            import_ray().kill(seat.actor)
            await asyncio.wait([answer])
        if answer.exception() is not None:
            self._lost(seat)

    def _lost(self, seat: Seat) -> None:
        """Note that the process of a seat has died, and start another one in its place. Each seat of it calls this."""
        worker = seat.worker
        if worker.actor is seat.actor and worker.info is not None:
            worker.info = None
            worker.num_lost = worker.num_running
            import_ray().kill(seat.actor)  # it may only be out of reach
            self._begin(worker)
        seat.had_company = worker.num_lost > 1

    def _fail_waiting(self, error: BaseException) -> None:
        for waiting in (self._suspects, self._waiting):
            while waiting:
                if not (turn := waiting.popleft()).done():
                    turn.set_exception(error)

    # -- workers --

    async def _open(self) -> None:
        """Join or start the cluster, and start the workers, once.

        Raises:
            ConfigError: it cannot be reached, or has no room for them.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        await asyncio.shield(self._opening)

    async def _start(self) -> None:
        _open_pools.add(self)
        try:
            # In this thread, though it takes seconds: Linux ends the processes of a local Ray with the thread that has
            # started them, and the threads of `asyncio.to_thread` end before Ray is left.
            env = _connect(self.address, self._runtime_env)
            self._options = {
                "num_cpus": self._asks.get("CPU", 0), "max_restarts": 0, "max_concurrency": 2 * self.concurrency + 8,
                "resources": {name: need for name, need in self._asks.items() if name != "CPU"}, "runtime_env": env,
            }  # fmt: skip
            await asyncio.to_thread(check_room, self.num_workers, self._asks)
            for worker in self._workers:
                self._begin(worker)
            await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None and self._has_none:
                raise self._failure
        except BaseException:
            await self._end()
            raise

    def _begin(self, worker: Worker) -> None:
        def ended(start: asyncio.Task[None]) -> None:
            if not start.cancelled() and (error := start.exception()) is not None:
                self._failure = error
                logger.warning("the pool goes on without a worker: %s", error)
                self._fill()

        self._starts[worker] = asyncio.create_task(self._bring_up(worker))
        self._starts[worker].add_done_callback(ended)

    async def _bring_up(self, worker: Worker) -> None:
        """Start a worker process, as often as it takes.

        Raises:
            ConfigError: the node has another version of ART, or its environment cannot be made.
        """
        ray = import_ray()
        host = ray.remote(_Host).options(**self._options)
        while True:
            worker.actor = host.remote([path for path in sys.path if path])
            hello = asyncio.ensure_future(_await(worker.actor.hello.remote()))
            try:
                while not (await asyncio.wait([hello], timeout=START_TIMEOUT_S))[0]:
                    if not any(other.info for other in self._workers):
                        self._fail_waiting(
                            ProcessError(f"no worker came up within {START_TIMEOUT_S:g} s: {describe_room()}")
                        )
            except asyncio.CancelledError:
                hello.cancel()
                raise
            try:
                info = hello.result()
            except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.RayTaskError) as error:
                raise ConfigError(f"a worker cannot start: {error}") from error
            except ray.exceptions.RayError as error:
                logger.warning("a worker died while it started, and is started again: %s", str(error)[:500])
                await asyncio.sleep(RESTART_PAUSE_S)
                continue
            if info.version != VERSION:
                raise ConfigError(
                    f"the node {info.host} has ART {info.version}, and the script has {VERSION}: install the "
                    "same version on all of them"
                )
            worker.info = info
            self._fill()
            return

    def _check_addresses(self, addresses: frozenset[str]) -> None:
        here = _loopback()
        away = next((worker.info for worker in self._workers if worker.info and worker.info.loopback != here), None)
        for address in addresses if away is not None else ():
            host = urlsplit(address).hostname or ""
            if host == "localhost" or host == "::1" or host.startswith("127."):
                raise ConfigError(
                    f"the worker on {away and away.host} cannot reach the model at {address}, an address of this "
                    "machine alone: start `art-server --host 0.0.0.0` on a machine that the cluster reaches, and "
                    "register the model with `art.RemoteBackend(...)` at its address there"
                )


class _Host:
    """The body of a worker process, as an asynchronous actor of Ray."""

    def __init__(self, paths: list[str]) -> None:
        sys.path.extend(path for path in paths if path not in sys.path and Path(path).exists())
        self._tasks: dict[int, asyncio.Task[bytes]] = {}
        self._cancelled: set[int] = set()
        """Calls that were cancelled before they came."""

    async def hello(self) -> WorkerInfo:
        """Load what the first rollout needs, and say who this is."""
        await asyncio.to_thread(load_openai)
        return WorkerInfo(version=VERSION, pid=os.getpid(), host=socket.gethostname(), loopback=_loopback())

    async def call(self, number: int, payload: bytes) -> bytes:
        """Run a call. One that is cancelled gives nothing."""
        if number in self._cancelled:
            self._cancelled.remove(number)
            return b""
        task = self._tasks[number] = asyncio.create_task(run_packed(payload))
        try:
            return await task
        except asyncio.CancelledError:
            return b""
        finally:
            del self._tasks[number]

    async def cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()
        else:
            self._cancelled.add(number)


async def _await(reference: Any) -> Any:
    return await reference


def _loopback() -> str:
    """Name the loopback network of this process: on Linux by the machine's boot and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _connect(address: str | None, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Join the cluster, or start one on this machine. Returns the runtime environment that actors still need.

    Raises:
        ConfigError: there is no cluster at the address, or it refuses: another version of Ray or Python, no token.
    """
    global _started_ray
    if import_ray().is_initialized():
        return runtime_env
    connect(address, runtime_env=runtime_env)
    _started_ray = True
    return {}


def _leave() -> None:
    global _started_ray
    _started_ray = False
    import_ray().shutdown()


def check_room(num_workers: int, asks: Mapping[str, float]) -> None:
    """Raise a `ConfigError` if the cluster cannot hold the workers. Ray itself would wait for ever."""
    ray = import_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asked = ", ".join(f"{name} {need:g}" for name, need in asks.items())
    room = sum(
        int(min((node.get(name, 0.0) / need for name, need in asks.items()), default=num_workers)) for node in nodes
    )
    if room < num_workers:
        raise ConfigError(
            f"RayWorkers({num_workers}) asks for {num_workers} workers with {asked} each, and the cluster has room for "
            f"{room}: {describe_room()}. Ask for fewer workers, lower `cpus` (0.1 is enough for rollouts that mostly "
            "wait), or add nodes"
        )
    deadline = time.monotonic() + ROOM_TIMEOUT_S
    while any(ray.available_resources().get(name, 0.0) < num_workers * need - 1e-6 for name, need in asks.items()):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"RayWorkers({num_workers}) asks for {num_workers} workers with {asked} each, and other programs use a "
                f"part of the cluster: {describe_room()}. Ask for less, or end what else runs there"
            )
        time.sleep(0.1)
