"""Starts, watches and restarts the engine and trainer processes.

A `ChildProcess` is up, starting, or given up on. Whoever needs it awaits `connect()`: that returns at once when it is
up, waits while it (re)starts, and raises `ProcessError` with the last lines of the child's log when it cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.config import MemoryConfig
from art.errors import ArtError, ProcessError
from art.protocol.exits import describe_exit
from art.protocol.rpc import PendingCall, RpcClient
from art.runtime.supervision.stacks import dump_stacks
from art.runtime.supervision.vitals import Limits, Vitals
from art.storage.logs import log_tail, open_log, rotate_log

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Starts in a row that may fail before a child is given up on."""
CRASH_LIMIT, CRASH_WINDOW_S = 20, 120.0
"""More crashes than this within the window, and a child that comes up but keeps dying is given up on."""
EXIT_TIMEOUT_S = 3.0
"""From the end of a child's connection to its exit."""
CHECK_S = 1.0
"""Between two looks at a child that runs."""
LOG_CHECKS = 60
"""Looks between two at the length of its log."""
INTERRUPT_AFTER_S = 60.0
"""How long a child that is to be started anew may go on with its calls, if they can be interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start one kind of child."""

    name: str
    module: str
    log_path: Path
    num_threads: int
    start_timeout_s: float
    heartbeat_timeout_s: float
    stall_timeout_s: float
    """How long the main thread may work on one thing."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    interruptible: bool = False
    """Calls of a child that ends go on with its successor, at little cost: it need not be idle to be started anew."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, e.g. which GPUs it sees."""

    def environment(self) -> dict[str, str]:
        """Passive waiting and a fixed thread count: spinning OpenMP barriers of two processes on the same cores cost
        more than ten times the work itself. Must be set before torch is imported."""
        threads = str(self.num_threads)
        return os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",  # the last lines of a log are to tell of a death, not of its loading
            "PYTHONUNBUFFERED": "1",
            **self.variables,
        }


class ChildProcess:
    """One supervised child. `initialise` runs on each new connection before anybody else may use it; no process is
    started while `may_start` is not set."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        may_start: asyncio.Event | None = None,
    ) -> None:
        self.spec = spec
        self._initialise = initialise
        self._may_start = may_start
        self._process: asyncio.subprocess.Process | None = None
        self._connection: RpcClient | None = None
        """To the process that runs or starts."""
        self._client: RpcClient | None = None
        """The same, once it may be used."""
        self._changed = asyncio.Condition()
        self._failure: ArtError | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._vitals: Vitals | None = None
        self._cause: str | None = None
        """Why the process that runs now was killed by this one."""
        self._last_end: str | None = None
        self.num_waiting = 0
        """Callers that wait until it is up."""
        self._crashes: deque[float] = deque(maxlen=CRASH_LIMIT)
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def status(self) -> dict[str, Any]:
        state = "failed" if self._failure else "up" if self._client else "starting"
        heartbeat = self._vitals.heartbeat if self._vitals else {}
        return {
            "state": state, "pid": self.pid, "restarts": self.num_restarts, "last_end": self._last_end, **heartbeat,
        }  # fmt: skip

    def start(self) -> None:
        """Begin to start, also if it was given up on; does not wait."""
        if self._failure is not None:
            self._failure, self._supervisor = None, None
            self._crashes.clear()
        if self._supervisor is None:
            self._supervisor = asyncio.get_running_loop().create_task(
                self._supervise(), name=f"supervise-{self.spec.name}"
            )

    async def connect(self) -> RpcClient:
        """The live connection.

        Raises:
            ProcessError: the child was given up on, or did not come up in time.
            ArtError: what `initialise` said no to, e.g. a model that cannot be loaded.
        """
        while (client := self.live_client) is None:
            if self._failure is None:
                self.start()
            await self._until_changed()
        return client

    async def _until_changed(self) -> None:
        """Wait until the child is up or given up on; raises in the latter case."""
        deadline_s = self.spec.start_timeout_s * MAX_FAILED_STARTS
        self.num_waiting += 1
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self.live_client is not None or self._failure is not None)
        except TimeoutError:
            raise ProcessError(
                f"the {self.spec.name} did not come up within {deadline_s:.0f} s{self._log_tail()}"
            ) from None
        finally:
            self.num_waiting -= 1
        if self._failure is not None:
            failure = type(self._failure)(self._failure.message)
            failure.transient = False
            raise failure

    @property
    def live_client(self) -> RpcClient | None:
        """The connection, if there is one. A dead child's stays here for a moment, until its death is noticed: nobody
        may be sent there."""
        return self._client if self._client is not None and not self._client.closed else None

    @property
    def given_up(self) -> bool:
        return self._failure is not None

    async def close(self) -> None:
        """End the child and the watching of it; whoever waits for it gets a `ProcessError`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._give_up(ProcessError(f"the {self.spec.name} was closed"))
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()  # the end of its socket is a child's signal to leave
        if self._process is not None:
            await _until_exit(self._process)

    async def _supervise(self) -> None:
        failed_starts = 0
        while True:
            if self._may_start is not None:
                await self._may_start.wait()
            try:
                process, client, watch = await self._start_once()
            except Exception as raised:
                error = raised if isinstance(raised, ArtError) else _unforeseen(self.spec.name, raised)
                failed_starts += 1
                logger.error(
                    "the %s failed to start (%d of %d): %s", self.spec.name, failed_starts, MAX_FAILED_STARTS, error
                )
                if failed_starts >= MAX_FAILED_STARTS or not isinstance(error, ProcessError):
                    await self._give_up(error)
                    return
                await asyncio.sleep(0.5 * 2**failed_starts)
                continue
            failed_starts = 0
            await self._set_client(client)
            retired = await watch
            await self._set_client(None)
            self.num_restarts += 1
            if retired is not None:
                self._last_end = retired
                continue
            death = self._death(process)
            self._last_end = death.message.splitlines()[0]
            client.fail(death)
            await client.close()
            logger.error("restarting the %s: %s", self.spec.name, death.message)
            self._crashes.append(time.monotonic())
            if len(self._crashes) == CRASH_LIMIT and self._crashes[-1] - self._crashes[0] < CRASH_WINDOW_S:
                await self._give_up(
                    ProcessError(f"{death.message}\nIt died {CRASH_LIMIT} times in {CRASH_WINDOW_S:.0f} s.")
                )
                return

    async def _start_once(self) -> tuple[asyncio.subprocess.Process, RpcClient, asyncio.Task[str | None]]:
        """A child that is ready, its connection, and the task that watches it."""
        spec = self.spec
        ours, theirs = socket.socketpair()
        with theirs, open_log(spec.log_path) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", spec.module, "--fd", str(theirs.fileno()), "--log", str(spec.log_path),
                "--heartbeat-timeout", str(spec.heartbeat_timeout_s),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=spec.environment(),
            )  # fmt: skip
        limits = Limits(
            heartbeat_timeout_s=spec.heartbeat_timeout_s, stall_timeout_s=spec.stall_timeout_s, memory=spec.memory
        )
        self._process, self._cause = process, None
        vitals = self._vitals = Vitals(limits, process.pid)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**24)
        client = RpcClient(reader, writer, vitals.on_heartbeat, lambda: self._explain_loss(process))
        self._connection = client
        watch = asyncio.create_task(self._watch(process, client), name=f"watch-{spec.name}")
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                await self._initialise(client)
        except BaseException as error:
            watch.cancel()
            await client.close()
            if alive := process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise ProcessError(
                    f"the {spec.name} was not ready after {spec.start_timeout_s:.0f} s{self._log_tail()}"
                ) from None
            if isinstance(error, ProcessError):
                what = f"could not start: {error.message}" if alive else f"died while starting ({self._how(process)})"
                raise ProcessError(f"the {spec.name} {what}{self._log_tail()}") from error
            raise
        vitals.is_ready = True
        logger.info("the %s is up (pid %d)", spec.name, process.pid)
        return process, client, watch

    async def _watch(self, process: asyncio.subprocess.Process, client: RpcClient) -> str | None:
        """Returns when the process is gone. Kills it when its heartbeat stops, or its main thread does; lets it go when
        it should be started anew, and then returns the reason."""
        vitals = self._vitals
        assert vitals is not None
        exited = asyncio.ensure_future(process.wait())
        num_checks, wanted_since = 0, None
        try:
            while not exited.done():
                before = time.monotonic()
                await asyncio.wait([exited], timeout=CHECK_S)
                if (late_s := time.monotonic() - before - CHECK_S) > CHECK_S:
                    vitals.forgive(late_s)
                if exited.done():
                    break
                if (problem := vitals.stuck(client.pending)) is not None:
                    await self._kill(process, problem)
                    continue
                if self._client is client and (reason := vitals.memory_problem()) is not None:
                    wanted_since = wanted_since or before
                    waited_s = time.monotonic() - wanted_since
                    if vitals.is_idle(client.pending) or (self.spec.interruptible and waited_s > INTERRUPT_AFTER_S):
                        return await self._retire(process, client, reason)
                num_checks += 1
                if num_checks % LOG_CHECKS == 0:
                    await asyncio.to_thread(rotate_log, self.spec.log_path)
        finally:
            exited.cancel()
        return None

    async def end(self, cause: str) -> None:
        """Kill the process that runs now, for a reason that its callers are told; it is started anew."""
        if self._process is not None:
            await self._kill(self._process, cause)

    async def _kill(self, process: asyncio.subprocess.Process, cause: str) -> None:
        if process.returncode is not None or self._cause is not None:
            return
        self._cause = f"{cause} and was killed"
        logger.error("the %s (pid %d) is to be killed: %s", self.spec.name, process.pid, cause)
        await asyncio.to_thread(dump_stacks, self.status)  # into its log, whose end goes with the error
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _retire(self, process: asyncio.subprocess.Process, client: RpcClient, reason: str) -> str:
        """End a healthy process; it leaves by itself when its connection ends."""
        logger.warning("the %s (pid %d) is started anew: %s", self.spec.name, process.pid, reason)
        await self._set_client(None)
        client.fail(ProcessError(f"the {self.spec.name} is started anew: {reason}"))
        await client.close()
        await _until_exit(process)
        return f"the {self.spec.name} was started anew: {reason}"

    async def _explain_loss(self, process: asyncio.subprocess.Process) -> ProcessError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        return self._death(process)

    def _death(self, process: asyncio.subprocess.Process) -> ProcessError:
        return ProcessError(f"the {self.spec.name} died ({self._how(process)}){self._log_tail()}")

    def _how(self, process: asyncio.subprocess.Process) -> str:
        how = describe_exit(process.returncode)
        if self._cause is not None:
            how += f"; {self._cause}"
        elif process.returncode == -signal.SIGKILL:
            how += "; sent from outside: the system does that when memory runs out"
        return how

    @property
    def pending(self) -> list[PendingCall]:
        """Calls that the child, also one that starts, has not answered."""
        return self._connection.pending if self._connection else []

    def stalled_s(self) -> float:
        """How long somebody has waited for this child without any sign of progress; 0 if nobody does."""
        if self._vitals is None or self._failure is not None:
            return 0.0
        return self._vitals.stalled_s(self.pending)

    async def _set_client(self, client: RpcClient | None) -> None:
        async with self._changed:
            self._client = client
            self._changed.notify_all()

    async def _give_up(self, error: ArtError) -> None:
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _log_tail(self) -> str:
        return log_tail(self.spec.log_path)


async def _until_exit(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was asked to leave, and kill it if it does not."""
    if process.returncode is None:
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _unforeseen(name: str, error: Exception) -> ProcessError:
    logger.error("the %s could not be started", name, exc_info=error)
    return ProcessError(f"the {name} could not be started: {type(error).__name__}: {error}")


def split_threads(engine_threads: int | None, trainer_threads: int | None) -> tuple[int, int]:
    """Threads for engine and trainer: what is asked for, else disjoint halves of the usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    half = max(1, cores // 2)
    return engine_threads or half, trainer_threads or max(1, cores - half)
