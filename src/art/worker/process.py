"""Starts, watches and restarts the engine and trainer processes.

A `ChildProcess` is up, starting, or failed. Callers await `connect()`. It returns at once when the child is up, waits
while the child starts or restarts, and raises `ProcessError` with the last lines of the log when the child has failed.
A failed child is still tried again, with growing pauses. `Vitals` draws conclusions from its heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.backoff import Backoff
from art.config import ServerConfig
from art.config.server import FAILED_STARTS
from art.errors import ArtError, ProcessError
from art.protocol.rpc import RpcClient
from art.storage.logs import describe_exit, log_tail, rotate_log
from art.worker.launch import EXIT_TIMEOUT_S, Launcher, LocalLauncher, Process, Program, abort, kill, until_exit

logger = logging.getLogger(__name__)

FIRST_HEARTBEAT_S = 60.0
"""Least time a process gets for its first heartbeat, since the interpreter starts slowly on a busy machine."""
STALL_TIMEOUT_S = 1800.0
"""Kill and restart a child that still sends heartbeats but has spent this many seconds in one micro-batch or engine
step."""
CHECK_S = 1.0
"""Time between two checks of a running child."""
LOG_CHECKS = 60
"""Number of checks of a child between two checks of the length of its log."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pause after the first failure of a child, and the longest. Registering a model ends a pause at once."""
SOON_S = 2.0
"""A child that dies within this time after its start would die again at once, so the next start waits too."""


class Vitals:
    """What a supervisor knows of a running child: its newest heartbeat, when that came, and the conclusions from it.

        heartbeat {"doing": "step", "since_s": 0.2, "rss_bytes": ..., ...}  -->  is it stuck?  since when?

    `doing` is `idle` or what the main thread works on; `since_s` is how long ago it last said so. Times are readings of
    `time.monotonic`.
    """

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._last_heartbeat = self._last_tick = time.monotonic()
        self.is_ready = False
        """Whether the process has loaded its model. Until then `child_start_timeout_s` limits it."""
        self.heartbeat: dict[str, Any] = {}
        """The newest heartbeat; empty before the first."""

    def on_heartbeat(self, heartbeat: dict[str, Any]) -> None:
        self._last_heartbeat = time.monotonic()
        self._last_tick = self._last_heartbeat - heartbeat.get("since_s", 0.0)
        self.heartbeat = heartbeat

    def extend_deadlines(self, late_s: float) -> None:
        """Give the child more time, because the supervisor itself was blocked and has not read its heartbeats yet."""
        self._last_heartbeat += late_s

    def stuck(self) -> str | None:
        """Explain why the running child counts as stuck: it is silent or makes no progress. `None` if it is not."""
        now, doing = time.monotonic(), self.heartbeat.get("doing", "starting")
        silent_s, same_s = now - self._last_heartbeat, now - self._last_tick
        if silent_s > max(self._limits.heartbeat_timeout_s, 0.0 if self.heartbeat else FIRST_HEARTBEAT_S):
            return f"it was silent for {silent_s:.0f} s" + (f" ({doing})" if doing != "idle" else "")
        if self.is_ready and doing != "idle" and same_s > STALL_TIMEOUT_S:
            return f"it made no progress for {same_s:.0f} s ({doing})"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start and supervise an engine process or a trainer process."""

    name: str
    module: str
    log_path: Path
    num_threads: int
    config: ServerConfig
    """Limits: how long the child may take or be silent."""
    is_new: bool = False
    """Somebody has just named the model that the child loads. Until it has been up once, or the model is registered,
    what `initialise` refuses is their answer as it is. Later a failed start is a `ProcessError`, and is tried again."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables, e.g. which GPUs the child sees."""
    launcher: Launcher = field(default_factory=LocalLauncher)
    """Starts the child, on this machine unless it says otherwise."""
    place: str = ""
    """Its devices and why it has them, for people."""
    first_pause_s: float = FIRST_PAUSE_S
    """Pause before the second start of a child that failed."""


class ChildProcess:
    """An engine process or trainer process, with its supervision: it is watched, and restarted when it dies."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        may_start: asyncio.Event | None = None,
    ) -> None:
        """`initialise` runs on each new connection before anybody else may use it. No process starts while the event
        `may_start` is not set."""
        self.spec = spec
        self._initialise = initialise
        self._may_start = may_start
        self._process: Process | None = None
        self._client: RpcClient | None = None
        """The connection once `initialise` has run on it."""
        self._failure: ArtError | None = None
        self._changed = asyncio.Condition()
        """Notified when `_client` or `_failure` has changed."""
        self._supervisor: asyncio.Task[None] | None = None
        self._vitals: Vitals | None = None
        self._cause: str | None = None
        """Why this supervisor killed the current process."""
        self._last_end: str | None = None
        self._num_failed_starts = 0
        """Starts in a row that failed."""
        self._num_setbacks = 0
        """Failed starts, and deaths soon after a start, since the child last ran for longer."""
        self._due_at = 0.0
        """Time of the next start, by `time.monotonic`."""
        self._hurry = asyncio.Event()
        """Ends the pause before the next start."""
        self.is_new = spec.is_new
        """Whether what `initialise` refuses is still the answer to a registration; see `ChildSpec.is_new`."""
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def is_begun(self) -> bool:
        """Whether anybody has needed the child since it was closed or made."""
        return self._supervisor is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def live_client(self) -> RpcClient | None:
        """The connection to the running child; `None` if it is not up, or has died unnoticed."""
        return self._client if self._client is not None and not self._client.closed else None

    @property
    def status(self) -> dict[str, Any]:
        state = "failed" if self._failure else "up" if self._client else "starting"
        heartbeat = self._vitals.heartbeat if self._vitals else {}
        return {
            "state": state, "pid": self.pid, "restarts": self.num_restarts, "last_end": self._last_end, **heartbeat,
        }  # fmt: skip

    def start(self) -> None:
        """Begin to start the child; a failed one without a further pause. Does not wait."""
        if self._failure is not None:
            self._failure = None
            self._num_failed_starts = self._num_setbacks = 0
            self._hurry.set()
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise-{self.spec.name}")

    async def connect(self) -> RpcClient:
        """Wait for the live connection.

        Raises:
            ProcessError: the child has failed, or did not come up in time.
            ArtError: `initialise` refused a new model, e.g. because it cannot be loaded.
        """
        deadline_s = self.spec.config.child_start_timeout_s * FAILED_STARTS
        while (client := self.live_client) is None:
            if self._failure is None:
                self.start()
            try:
                async with asyncio.timeout(deadline_s), self._changed:
                    await self._changed.wait_for(lambda: self.live_client is not None or self._failure is not None)
            except TimeoutError:
                problem = f"the {self.spec.name} did not come up within {deadline_s:.0f} s"
                raise ProcessError(problem + self._log_tail()) from None
            if self._failure is not None:
                message = self._failure.message
                if self._supervisor is not None:
                    left_s = max(0.0, self._due_at - time.monotonic())
                    message += f"\nIt is started again in {left_s:.0f} s, and after that with growing pauses"
                failure = type(self._failure)(message)
                failure.transient = False
                raise failure
        return client

    async def close(self) -> None:
        """End the child and its supervision. Everybody who waits for it gets a `ProcessError`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        client, self._client = self._client, None
        await self._change(failure=ProcessError(f"the {self.spec.name} was closed"))
        if client is not None:
            await client.close()  # the end of its socket is a child's signal to leave
        if self._process is not None:
            await until_exit(self._process)
        await self.spec.launcher.close()

    async def end(self, cause: str) -> None:
        """Kill the current process and tell its callers why. The supervisor then restarts it."""
        process = self._process
        if process is None or process.returncode is not None or self._cause is not None:
            return
        self._cause = f"{cause} and was killed"
        logger.error("killing the %s (pid %d): %s", self.spec.name, process.pid, cause)
        await abort(process)  # it writes its stack into its log, whose last lines become part of the error

    async def _supervise(self) -> None:
        """Start the child, watch it until it is gone, tell its callers, and start it again, for ever."""
        backoff = Backoff(first_s=self.spec.first_pause_s, longest_s=LONGEST_PAUSE_S)
        while True:
            pause_s = backoff.pause_s(self._num_setbacks) if self._num_setbacks else 0.0
            self._due_at = time.monotonic() + pause_s
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
            if self._may_start is not None:
                await self._may_start.wait()
            try:
                process, client, watch = await self._start_once()
            except Exception as error:
                await self._note_failed_start(error)
                continue
            self.is_new, self._num_failed_starts, up_since = False, 0, time.monotonic()
            self._client = client
            await self._change(failure=None)
            await watch
            self._client = None
            self.num_restarts += 1
            self._num_setbacks = self._num_setbacks + 1 if time.monotonic() - up_since < SOON_S else 0
            death = self._death(process)
            self._last_end = death.message.splitlines()[0]
            client.fail(death)
            await client.close()
            logger.error("restarting the %s: %s", self.spec.name, death.message)

    async def _start_once(self) -> tuple[Process, RpcClient, asyncio.Task[None]]:
        """Start the child; return it when it is ready, with its connection and the task that watches it."""
        spec, timeout_s = self.spec, self.spec.config.child_start_timeout_s
        vitals = self._vitals = Vitals(spec.config)
        self._process, self._cause = None, None
        client = RpcClient(vitals.on_heartbeat, self._explain_loss)
        program = Program(
            module=spec.module, log_path=spec.log_path, num_threads=spec.num_threads, variables=spec.variables
        )
        process = self._process = await spec.launcher.start(program, client, timeout_s)
        watch = asyncio.create_task(self._watch(process, vitals), name=f"watch-{spec.name}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._initialise(client)
        except BaseException as error:
            watch.cancel()
            await client.close()
            alive = process.returncode is None
            await kill(process)
            if isinstance(error, TimeoutError):
                raise ProcessError(f"the {spec.name} was not ready after {timeout_s:.0f} s{self._log_tail()}") from None
            if isinstance(error, ProcessError):
                what = f"could not start: {error.message}" if alive else f"died while starting ({self._how(process)})"
                raise ProcessError(f"the {spec.name} {what}{self._log_tail()}") from error
            raise
        vitals.is_ready = True
        logger.info("the %s is up (pid %d)", spec.name, process.pid)
        return process, client, watch

    async def _note_failed_start(self, raised: Exception) -> None:
        """Log why a start failed. Callers get the error if further starts are unlikely to help."""
        self._num_failed_starts += 1
        self._num_setbacks += 1
        if not isinstance(raised, ArtError):
            logger.error("the %s could not be started", self.spec.name, exc_info=raised)
            error: ArtError = ProcessError(
                f"the {self.spec.name} could not be started: {type(raised).__name__}: {raised}"
            )
        elif isinstance(raised, ProcessError) or self.is_new:
            error = raised
        else:
            error = ProcessError(f"the {self.spec.name} could not start: {raised.message}")
        number, limit = self._num_failed_starts, FAILED_STARTS
        logger.error("the %s failed to start (failure %d, limit %d): %s", self.spec.name, number, limit, error)
        is_answer = error is raised and not isinstance(error, ProcessError)  # for who has just named the model
        if is_answer or number >= limit:
            await self._change(failure=error)

    async def _watch(self, process: Process, vitals: Vitals) -> None:
        """Watch the process until it is gone. Kill it when its heartbeat or its main thread stops."""
        exited = asyncio.ensure_future(process.wait())
        num_checks = 0
        try:
            while not exited.done():
                before = time.monotonic()
                await asyncio.wait([exited], timeout=CHECK_S)
                if (late_s := time.monotonic() - before - CHECK_S) > CHECK_S:
                    vitals.extend_deadlines(late_s)
                if not exited.done() and (problem := vitals.stuck()) is not None:
                    await self.end(problem)
                    break  # also if it is not gone: the system may be unable to end a process
                num_checks += 1
                if num_checks % LOG_CHECKS == 0:
                    await asyncio.to_thread(rotate_log, self.spec.log_path)
        finally:
            exited.cancel()

    async def _change(self, failure: ArtError | None) -> None:
        """Set the failure, and wake those who wait for a change."""
        async with self._changed:
            self._failure = failure
            self._changed.notify_all()

    async def _explain_loss(self) -> ProcessError:
        if (process := self._process) is None:
            return ProcessError(f"the {self.spec.name} lost its connection while it was started")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        return self._death(process)

    def _death(self, process: Process) -> ProcessError:
        return ProcessError(f"the {self.spec.name} died ({self._how(process)}){self._log_tail()}")

    def _how(self, process: Process) -> str:
        how = describe_exit(process.returncode)
        if self._cause is not None:
            how += f"; {self._cause}"
        elif process.returncode == -signal.SIGKILL:
            how += "; sent from outside: the system does that when memory runs out"
        return how

    def _log_tail(self) -> str:
        return log_tail(self.spec.log_path)


MakeProcess = Callable[[ChildSpec, Callable[[RpcClient], Awaitable[None]], asyncio.Event | None], ChildProcess]
"""Makes the supervised process of an engine or trainer: `ChildProcess`, or a double of it in tests."""
