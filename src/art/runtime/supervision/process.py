"""Starts, watches and restarts the engine and trainer processes.

A `ChildProcess` is up, starting, or failed. Callers await `connect()`. It returns at once when the child is up, waits
while the child starts or restarts, and raises `ProcessError` with the last lines of the log when the child has failed.
A failed child is still tried again, with growing pauses (`Comeback`). `Vitals` keeps books on a running child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from art.config import ServerConfig
from art.config.server import FAILED_STARTS
from art.errors import ArtError, ProcessError
from art.protocol.exits import describe_exit
from art.protocol.rpc import PendingCall, RpcClient
from art.runtime.supervision.launch import EXIT_TIMEOUT_S, Launch, Process, WarmParent, kill, until_exit
from art.runtime.supervision.waits import dump_stacks, process_state
from art.storage.logs import log_tail, open_log, rotate_log

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
INTERRUPT_AFTER_S = 60.0
"""An interruptible child that is due for a restart may continue its calls for this long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pause after the first failure of a child, and the longest. Registering a model ends a pause at once."""
SOON_S = 2.0
"""A child that dies within this time after its start would die again at once, so the next start waits too."""


class Comeback:
    """Pauses before the next start of a child that cannot start, or that dies as soon as it is up.

    The cause may go away by itself: a folder that is mounted again, memory of a GPU that another program gives back. So
    a child is tried for as long as something needs it, after 1, 2, 4 s ... up to `LONGEST_PAUSE_S`.
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self.num_failed_starts = 0
        """Starts in a row that failed."""
        self._num_setbacks = 0
        """Failed starts, and deaths soon after a start, since the child last ran for longer."""
        self._up_since = self._due_at = 0.0
        self._hurry = asyncio.Event()

    def note_failed_start(self) -> None:
        self.num_failed_starts += 1
        self._num_setbacks += 1

    def note_up(self) -> None:
        self.num_failed_starts = 0
        self._up_since = time.monotonic()

    def note_death(self) -> None:
        """Note that the child died while it was up."""
        self._num_setbacks = self._num_setbacks + 1 if time.monotonic() - self._up_since < SOON_S else 0

    def hurry(self) -> None:
        """Forget all failures and end the pause: somebody asks for the child, and the cause may be gone."""
        self.num_failed_starts = self._num_setbacks = 0
        self._hurry.set()

    @property
    def pause_s(self) -> float:
        """How long the next start has to wait."""
        if self._num_setbacks == 0:
            return 0.0
        return min(LONGEST_PAUSE_S, self._first_pause_s * 2.0 ** min(self._num_setbacks - 1, 64))

    async def pause(self) -> None:
        """Wait until it is time for the next start, or until `hurry`."""
        self._due_at = time.monotonic() + self.pause_s
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pause_s):
                await self._hurry.wait()

    def describe_next(self) -> str:
        """When the next start comes, as a sentence for an error."""
        left_s = self._due_at - time.monotonic()
        when = f"in {left_s:.0f} s" if left_s >= 1 else "now"
        return f"It is started again {when}, and after that with growing pauses"


class Vitals:
    """What a supervisor knows of a running child: its newest heartbeat, when that came, and the conclusions from it.

        heartbeat {"doing": "step", "since_s": 0.2, "rss_bytes": ..., ...}  -->  is it stuck?  since when?

    `doing` is `idle` or what the main thread works on; `since_s` is how long ago it last said so. It only keeps books,
    and `ChildProcess` acts on them. Times are readings of `time.monotonic`.
    """

    def __init__(self, limits: ServerConfig, pid: int) -> None:
        self._limits = limits
        self._pid = pid
        self._fits: bool | None = None
        """Whether the process was below the limit of its memory when it was ready; `None` before."""
        self._last_heartbeat = self._last_tick = self._heard_at = time.monotonic()
        self.is_ready = False
        """Whether the process has loaded its model. Until then `child_start_timeout_s` limits it."""
        self.heartbeat: dict[str, Any] = {}
        """The newest heartbeat; empty before the first."""

    def on_heartbeat(self, heartbeat: dict[str, Any]) -> None:
        now = time.monotonic()
        self._last_heartbeat = self._heard_at = now
        self._last_tick = now - heartbeat.get("since_s", 0.0)
        self.heartbeat = heartbeat
        limit, used = self._limits.memory_limit_bytes, heartbeat.get("rss_bytes")
        if self.is_ready and self._fits is None and limit is not None and used is not None:
            self._fits = used <= limit
            if not self._fits:
                logger.warning(
                    "a process that has just begun uses %s of memory, more than `memory_limit_bytes` = %s: a restart "
                    "would not help, so the limit is ignored. Raise it, or use a smaller model or context",
                    _gib(used), _gib(limit),
                )  # fmt: skip

    def extend_deadlines(self, late_s: float) -> None:
        """Give the child more time, because the supervisor itself was blocked and has not read its heartbeats yet."""
        self._last_heartbeat += late_s

    @property
    def doing(self) -> str:
        return str(self.heartbeat.get("doing", "starting"))

    def stuck(self, pending: Sequence[PendingCall]) -> str | None:
        """Explain why the running child counts as stuck: it is silent, makes no progress, or owes an answer.

        Returns `None` if it is not stuck. `pending` has the calls that it has not answered.
        """
        now = time.monotonic()
        silent_s, same_s = now - self._last_heartbeat, now - self._last_tick
        if silent_s > max(self._limits.heartbeat_timeout_s, 0.0 if self.heartbeat else FIRST_HEARTBEAT_S):
            return f"it was silent for {silent_s:.0f} s{self._state()}"
        if self.is_ready and self.doing != "idle" and same_s > STALL_TIMEOUT_S:
            return f"it made no progress for {same_s:.0f} s ({self.doing})"
        # An idle child has answered every call that it has read. If it still sends heartbeats this long after a call,
        # the missing answer will never come. A silent child may not have read the call.
        owed = [call for call in pending if self._heard_at - call.last_frame > self._limits.heartbeat_timeout_s]
        if owed and self.heartbeat and self.doing == "idle" and same_s > self._limits.heartbeat_timeout_s:
            return f"it owes an answer to `{owed[0].method}` for {now - owed[0].last_frame:.0f} s, and is idle"
        return None

    def memory_problem(self) -> str | None:
        """Explain why the process should be restarted: it has come to hold too much memory. `None` if it does not."""
        limit, used = self._limits.memory_limit_bytes, self.heartbeat.get("rss_bytes") or 0
        if not self._fits or limit is None or used <= limit:
            return None
        return f"it uses {_gib(used)} of memory, more than the limit of {_gib(limit)}"

    def is_idle(self, pending: Sequence[PendingCall]) -> bool:
        return not pending and self.doing == "idle"

    def stalled_s(self, pending: Sequence[PendingCall]) -> float:
        """Seconds for which callers have waited for this child without any progress; 0 if none waits."""
        if not pending:
            return 0.0
        now = time.monotonic()
        last_event = max(self._last_tick, *(call.last_frame for call in pending))
        return now - max(last_event, min(call.since for call in pending))

    def _state(self) -> str:
        if process_state(self._pid) == "T":
            return " (a signal has stopped it)"
        return f" ({self.doing})" if self.doing != "idle" else ""


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start and supervise an engine process or a trainer process."""

    name: str
    module: str
    log_path: Path
    num_threads: int
    config: ServerConfig
    """Limits: how long the child may take or be silent, its memory, and how often it is started again."""
    interruptible: bool = False
    """The child may restart while it is busy: its calls continue on the new process at little cost."""
    is_new: bool = False
    """Somebody has just named the model that the child loads. Until it has been up once, or the model is registered,
    what `initialise` refuses is their answer as it is. Later a failed start is a `ProcessError`, and is tried again."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables, e.g. which GPUs the child sees."""
    warm_parent: WarmParent | None = None
    """Forks the child, if it can; only for a child that computes on the CPU."""
    place: str = ""
    """Its devices and why it has them, for people."""
    first_pause_s: float = FIRST_PAUSE_S
    """Pause before the second start of a child that failed."""

    def environment(self) -> dict[str, str]:
        """Return the child's environment, with passive waiting and a fixed thread count.

        Spinning OpenMP barriers of two processes on the same cores cost more than ten times the work itself. The
        variables must be set before torch is imported.
        """
        threads = str(self.num_threads)
        return os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",  # progress bars would hide the cause of a death in the last lines of the log
            "PYTHONUNBUFFERED": "1",
            **self.variables,
        }


class ChildProcess:
    """An engine process or trainer process, with its supervision: it is watched, and restarted when it dies."""

    def __init__(
        self,
        spec: ChildSpec,
        initialise: Callable[[RpcClient], Awaitable[None]],
        may_start: asyncio.Event | None = None,
    ) -> None:
        """
        Args:
            initialise: runs on each new connection before anybody else may use it.
            may_start: no process starts while this event is not set.
        """
        self.spec = spec
        self._initialise = initialise
        self._may_start = may_start
        self._process: Process | None = None
        self._connection: RpcClient | None = None
        """The connection to the process that runs or starts."""
        self._client: RpcClient | None = None
        """The connection once `initialise` has run on it."""
        self._changed = asyncio.Condition()
        self._failure: ArtError | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._vitals: Vitals | None = None
        self._cause: str | None = None
        """Why this supervisor killed the current process."""
        self._last_end: str | None = None
        self.num_waiting = 0
        """Callers that wait until the child is up."""
        self._comeback = Comeback(spec.first_pause_s)
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
            self._comeback.hurry()
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise-{self.spec.name}")

    async def connect(self) -> RpcClient:
        """Wait for the live connection.

        Raises:
            ProcessError: the child has failed, or did not come up in time.
            ArtError: `initialise` refused a new model, e.g. because it cannot be loaded.
        """
        while (client := self.live_client) is None:
            if self._failure is None:
                self.start()
            await self._until_changed()
        return client

    async def _until_changed(self) -> None:
        """Wait until the child is up. Raises if it has failed."""
        deadline_s = self.spec.config.child_start_timeout_s * FAILED_STARTS
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
            message = self._failure.message
            if self._supervisor is not None:
                message += f"\n{self._comeback.describe_next()}"
            failure = type(self._failure)(message)
            failure.transient = False
            raise failure

    @property
    def live_client(self) -> RpcClient | None:
        """The connection to the running child; `None` if it is not up, or has died unnoticed."""
        return self._client if self._client is not None and not self._client.closed else None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    async def close(self) -> None:
        """End the child and its supervision. Everybody who waits for it gets a `ProcessError`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        await self._fail(ProcessError(f"the {self.spec.name} was closed"))
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()  # the end of its socket is a child's signal to leave
        if self._process is not None:
            await until_exit(self._process)

    async def _supervise(self) -> None:
        while True:
            await self._comeback.pause()
            if self._may_start is not None:
                await self._may_start.wait()
            try:
                process, client, watch = await self._start_once()
            except Exception as error:
                await self._note_failed_start(error)
                continue
            self.is_new = False
            self._comeback.note_up()
            await self._set_client(client)
            retired = await watch
            await self._set_client(None)
            self.num_restarts += 1
            if retired is not None:
                self._last_end = retired
            else:
                await self._bury(process, client)

    async def _note_failed_start(self, raised: Exception) -> None:
        """Log why a start failed. Callers get the error if further starts are unlikely to help."""
        self._comeback.note_failed_start()
        error, is_refused = self._explain(raised)
        number, limit = self._comeback.num_failed_starts, FAILED_STARTS
        logger.error("the %s failed to start (failure %d, limit %d): %s", self.spec.name, number, limit, error)
        if is_refused or number >= limit:
            await self._fail(error)

    def _explain(self, raised: Exception) -> tuple[ArtError, bool]:
        """The error for callers, and whether it is the answer to somebody who has just named the model."""
        if isinstance(raised, ProcessError):
            return raised, False
        if isinstance(raised, ArtError):
            if self.is_new:
                return raised, True
            return ProcessError(f"the {self.spec.name} could not start: {raised.message}"), False
        logger.error("the %s could not be started", self.spec.name, exc_info=raised)
        return ProcessError(f"the {self.spec.name} could not be started: {type(raised).__name__}: {raised}"), False

    async def _bury(self, process: Process, client: RpcClient) -> None:
        """Report the death of a child to its callers."""
        death = self._death(process)
        self._last_end = death.message.splitlines()[0]
        client.fail(death)
        await client.close()
        logger.error("restarting the %s: %s", self.spec.name, death.message)
        self._comeback.note_death()

    async def _start_once(self) -> tuple[Process, RpcClient, asyncio.Task[str | None]]:
        """Start the child; return it when it is ready, with its connection and the task that watches it."""
        spec = self.spec
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, socket.socketpair())
            with theirs, open_log(spec.log_path) as log:
                process = await self._launch(theirs, log)
            on_failure.pop_all()
        self._process, self._cause = process, None
        vitals = self._vitals = Vitals(spec.config, process.pid)
        client = await RpcClient.connect(ours, vitals.on_heartbeat, lambda: self._explain_loss(process))
        self._connection = client
        watch = asyncio.create_task(self._watch(process, client, vitals), name=f"watch-{spec.name}")
        try:
            async with asyncio.timeout(spec.config.child_start_timeout_s):
                await self._initialise(client)
        except BaseException as error:
            watch.cancel()
            await client.close()
            alive = process.returncode is None
            await kill(process)
            if isinstance(error, TimeoutError):
                timeout_s = spec.config.child_start_timeout_s
                raise ProcessError(f"the {spec.name} was not ready after {timeout_s:.0f} s{self._log_tail()}") from None
            if isinstance(error, ProcessError):
                what = f"could not start: {error.message}" if alive else f"died while starting ({self._how(process)})"
                raise ProcessError(f"the {spec.name} {what}{self._log_tail()}") from error
            raise
        vitals.is_ready = True
        logger.info("the %s is up (pid %d)", spec.name, process.pid)
        return process, client, watch

    async def _launch(self, frames: socket.socket, log: IO[bytes]) -> Process:
        spec, config = self.spec, self.spec.config
        argv = ["--log", str(spec.log_path), "--heartbeat-timeout", str(config.heartbeat_timeout_s)]
        launch = Launch(module=spec.module, argv=argv, frames=frames, log=log, environment=spec.environment())
        if spec.warm_parent is not None:
            process = await spec.warm_parent.fork(launch, config.child_start_timeout_s)
            if process is not None:
                return process
        return await launch.start()

    async def _watch(self, process: Process, client: RpcClient, vitals: Vitals) -> str | None:
        """Watch the process until it is gone. Kill it when its heartbeat or its main thread stops.

        Returns:
            why the process was ended to be restarted, or `None` if it died.
        """
        exited = asyncio.ensure_future(process.wait())
        num_checks, due_since = 0, None
        try:
            while not exited.done():
                before = time.monotonic()
                await asyncio.wait([exited], timeout=CHECK_S)
                if (late_s := time.monotonic() - before - CHECK_S) > CHECK_S:
                    vitals.extend_deadlines(late_s)
                if exited.done():
                    break
                if (problem := vitals.stuck(client.pending)) is not None:
                    await self.end(problem)
                    break  # also if it is not gone: the system may be unable to end a process
                if self._client is client and (reason := vitals.memory_problem()) is not None:
                    due_since = due_since or before
                    waited_s = time.monotonic() - due_since
                    if vitals.is_idle(client.pending) or (self.spec.interruptible and waited_s > INTERRUPT_AFTER_S):
                        return await self._retire(process, client, reason)
                num_checks += 1
                if num_checks % LOG_CHECKS == 0:
                    await asyncio.to_thread(rotate_log, self.spec.log_path)
        finally:
            exited.cancel()
        return None

    async def end(self, cause: str) -> None:
        """Kill the current process and tell its callers why. The supervisor then restarts it."""
        process = self._process
        if process is None or process.returncode is not None or self._cause is not None:
            return
        self._cause = f"{cause} and was killed"
        logger.error("killing the %s (pid %d): %s", self.spec.name, process.pid, cause)
        await asyncio.to_thread(dump_stacks, self.status)  # into its log, whose last lines become part of the error
        await kill(process)

    async def _retire(self, process: Process, client: RpcClient, reason: str) -> str:
        """End a healthy process, which exits by itself when its connection ends. Returns what its callers are told."""
        logger.warning("restarting the %s (pid %d): %s", self.spec.name, process.pid, reason)
        await self._set_client(None)
        end = f"the {self.spec.name} was restarted: {reason}"
        client.fail(ProcessError(end))
        await client.close()
        await until_exit(process)
        return end

    async def _explain_loss(self, process: Process) -> ProcessError:
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

    @property
    def pending(self) -> list[PendingCall]:
        """Calls that the child has not answered, including a child that is starting."""
        return self._connection.pending if self._connection else []

    def stalled_s(self) -> float:
        """Seconds for which callers have waited for this child without any progress; 0 if none waits."""
        if self._vitals is None or self._failure is not None:
            return 0.0
        return self._vitals.stalled_s(self.pending)

    async def _set_client(self, client: RpcClient | None) -> None:
        async with self._changed:
            self._client = client
            if client is not None:
                self._failure = None
            self._changed.notify_all()

    async def _fail(self, error: ArtError) -> None:
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _log_tail(self) -> str:
        return log_tail(self.spec.log_path)


MakeProcess = Callable[[ChildSpec, Callable[[RpcClient], Awaitable[None]], asyncio.Event | None], ChildProcess]
"""Makes the supervised process of an engine or trainer: `ChildProcess`, or a double of it in tests."""
