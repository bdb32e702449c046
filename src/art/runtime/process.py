"""Starts, watches and restarts the engine and trainer processes.

A `ChildProcess` is up, starting, or given up on. Whoever needs it awaits `connect()`: that returns at once when it is
up, waits while it (re)starts, and raises `ProcessError` with the last lines of the child's log when it cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ArtError, ProcessError
from art.protocol.rpc import RpcClient
from art.storage.logs import log_tail, open_log

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Starts in a row that may fail before a child is given up on."""
CRASH_LIMIT, CRASH_WINDOW_S = 20, 120.0
"""More crashes than this within the window, and a child that comes up but keeps dying is given up on."""
EXIT_TIMEOUT_S = 3.0
"""From the end of a child's connection to its exit."""


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

    def environment(self) -> dict[str, str]:
        """Passive waiting and a fixed thread count: spinning OpenMP barriers of two processes on the same cores cost
        more than ten times the work itself. Must be set before torch is imported."""
        threads = str(self.num_threads)
        return os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }


class ChildProcess:
    """One supervised child. `initialise` runs on each new connection before anybody else may use it."""

    def __init__(self, spec: ChildSpec, initialise: Callable[[RpcClient], Awaitable[None]]) -> None:
        self.spec = spec
        self._initialise = initialise
        self._process: asyncio.subprocess.Process | None = None
        self._client: RpcClient | None = None
        self._changed = asyncio.Condition()
        self._failure: ArtError | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._last_heartbeat = 0.0
        self._heartbeat: dict[str, Any] = {}
        self._crashes: deque[float] = deque(maxlen=CRASH_LIMIT)
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def status(self) -> dict[str, Any]:
        state = "failed" if self._failure else "up" if self._client else "starting"
        return {"state": state, "pid": self.pid, "restarts": self.num_restarts, **self._heartbeat}

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
        while (client := self._live_client()) is None:
            if self._failure is None:
                self.start()
            await self._until_changed()
        return client

    async def _until_changed(self) -> None:
        """Wait until the child is up or given up on; raises in the latter case."""
        deadline_s = self.spec.start_timeout_s * MAX_FAILED_STARTS
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._live_client() is not None or self._failure is not None)
        except TimeoutError:
            raise ProcessError(
                f"the {self.spec.name} did not come up within {deadline_s:.0f} s{self._log_tail()}"
            ) from None
        if self._failure is not None:
            failure = type(self._failure)(self._failure.message)
            failure.transient = False
            raise failure

    def _live_client(self) -> RpcClient | None:
        """A dead child's connection stays here for a moment, until its death is noticed: nobody may be sent there."""
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
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _supervise(self) -> None:
        failed_starts = 0
        while True:
            try:
                process, client = await self._start_once()
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
            await self._until_dead(process)
            await self._set_client(None)
            death = self._death(process)
            client.fail(death)
            await client.close()
            logger.error("%s; restarting it", death.message)
            self.num_restarts += 1
            self._crashes.append(time.monotonic())
            if len(self._crashes) == CRASH_LIMIT and self._crashes[-1] - self._crashes[0] < CRASH_WINDOW_S:
                await self._give_up(
                    ProcessError(f"{death.message}\nIt died {CRASH_LIMIT} times in {CRASH_WINDOW_S:.0f} s.")
                )
                return

    async def _start_once(self) -> tuple[asyncio.subprocess.Process, RpcClient]:
        spec = self.spec
        ours, theirs = socket.socketpair()
        with theirs, open_log(spec.log_path) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", spec.module, "--fd", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=spec.environment(),
            )  # fmt: skip
        self._process = process
        self._last_heartbeat, self._heartbeat = time.monotonic(), {}
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**24)
        client = RpcClient(reader, writer, self._on_heartbeat, lambda: self._explain_loss(process))
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                await self._initialise(client)
        except BaseException as error:
            await client.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise ProcessError(
                    f"the {spec.name} was not ready after {spec.start_timeout_s:.0f} s{self._log_tail()}"
                ) from None
            if isinstance(error, ProcessError):
                exit_text = describe_exit(process.returncode)
                raise ProcessError(f"the {spec.name} died while starting ({exit_text}){self._log_tail()}") from error
            raise
        logger.info("the %s is up (pid %d)", spec.name, process.pid)
        return process, client

    async def _until_dead(self, process: asyncio.subprocess.Process) -> None:
        """Returns when the process is gone; kills it when its heartbeat stops, or its main thread does."""
        exited = asyncio.ensure_future(process.wait())
        try:
            while not exited.done():
                await asyncio.wait([exited], timeout=1.0)
                if (problem := self._stuck()) is not None and not exited.done():
                    logger.error("the %s (pid %d) %s: killing it", self.spec.name, process.pid, problem)
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
        finally:
            exited.cancel()

    def _stuck(self) -> str | None:
        """What is wrong with a child that still runs, or `None`."""
        silent_s = time.monotonic() - self._last_heartbeat
        if silent_s > self.spec.heartbeat_timeout_s:
            return f"was silent for {silent_s:.0f} s"
        doing, since_s = self._heartbeat.get("doing", "idle"), self._heartbeat.get("since_s", 0.0)
        if doing != "idle" and since_s > self.spec.stall_timeout_s:
            return f"made no progress for {since_s:.0f} s ({doing})"
        return None

    async def _explain_loss(self, process: asyncio.subprocess.Process) -> ProcessError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        return self._death(process)

    def _death(self, process: asyncio.subprocess.Process) -> ProcessError:
        return ProcessError(f"the {self.spec.name} died ({describe_exit(process.returncode)}){self._log_tail()}")

    def _on_heartbeat(self, status: dict[str, Any]) -> None:
        self._last_heartbeat = time.monotonic()
        self._heartbeat = status

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


def _unforeseen(name: str, error: Exception) -> ProcessError:
    logger.error("the %s could not be started", name, exc_info=error)
    return ProcessError(f"the {name} could not be started: {type(error).__name__}: {error}")


def describe_exit(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    return f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"


def split_threads(engine_threads: int | None, trainer_threads: int | None) -> tuple[int, int]:
    """Threads for engine and trainer: what is asked for, else disjoint halves of the usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    half = max(1, cores // 2)
    return engine_threads or half, trainer_threads or max(1, cores - half)
