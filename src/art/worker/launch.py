"""Starts a child process: forked by the warm parent of the server where that can be, otherwise in a new interpreter.

`LocalLauncher` does that. Other launchers start the same programs on other machines (`art.worker.door`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from art.errors import ProcessError
from art.protocol.rpc import RpcClient
from art.storage.logs import describe_exit, open_log
from art.worker.waits import waiting
from art.worker.warm_parent import THREAD_VARIABLES

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 3.0
"""Longest wait for a child to exit after its connection has ended."""
ANSWER_TIMEOUT_S = 10.0
"""Longest wait for what takes milliseconds: a fork, and the report that a child has ended."""
ABORT_TIMEOUT_S = 2.0
"""Longest wait for the stack of a process that is stuck. It writes it within milliseconds."""
_WARM_MODULE = "art.worker.warm_parent"


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that a supervisor uses."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, signal: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a child process runs, wherever that is."""

    module: str
    log_path: Path
    """File of this machine for what it prints to stderr; of a child elsewhere, for the end of that."""
    num_threads: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of every child, e.g. which GPUs it sees."""


class Launcher(Protocol):
    """Starts the programs of children."""

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        """Start a child and connect `client` to it.

        Raises:
            ProcessError: it was not started within `timeout_s` seconds.
        """

    async def close(self) -> None:
        """Give back what was kept for the next start of the child, which is not started any more."""


def child_environment(num_threads: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment: this process's own with `variables`, passive waiting and a fixed thread count.

    Spinning OpenMP barriers of two processes on the same cores cost more than ten times the work itself. The
    variables must be set before torch is imported.
    """
    threads = str(num_threads)
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress bars would hide the cause of a death in the last lines of the log
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


class ForkedProcess:
    """A child of the warm parent, which tells through a socket how it ended."""

    def __init__(self, pid: int, status: socket.socket, parent: asyncio.subprocess.Process) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._read_end(status, parent), name=f"end of process {pid}")

    async def _read_end(self, status: socket.socket, parent: asyncio.subprocess.Process) -> int:
        answer = b""
        with status:
            await _until_gone(self.pid)
            try:
                async with waiting(
                    f"the warm parent (pid {parent.pid}) to report the end of a child", ANSWER_TIMEOUT_S
                ):
                    answer = await asyncio.get_running_loop().sock_recv(status, 64)
            except ProcessError as error:
                logger.error("%s. It is killed, and its other children with it; they start again", error)
                await kill(parent)
        self.returncode = int(answer) if answer else -signal.SIGKILL  # children are killed with the warm parent
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signal: int, /) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a new child process gets."""

    module: str
    argv: list[str]
    frames: socket.socket
    """Its end of a socket pair for frames."""
    log: IO[bytes]
    """Where its output goes."""
    environment: Mapping[str, str]

    async def start(self) -> Process:
        """Start the child in a new interpreter."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, "--fd", str(self.frames.fileno()), *self.argv,
            pass_fds=[self.frames.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env=self.environment,
        )  # fmt: skip


class WarmParent:
    """The warm parent of one server, which forks its children. It starts with `start` or a first child.

    One that ends or hangs is replaced, unless it never forked a child: children then start in new interpreters.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._has_forked = False
        """Whether the current process has forked a child, so that another fork takes milliseconds."""
        self._is_unfit = sys.platform != "linux"

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start it without waiting for its imports, so that the first child need not wait for all of them."""
        async with self._lock:
            if not self._is_unfit:
                await self._running(environment)

    async def fork(self, launch: Launch, timeout_s: float) -> Process | None:
        """Fork a child. Returns `None` where that cannot be done, so that a new interpreter is needed. A first fork,
        which comes after the imports, may take `timeout_s`."""
        async with self._lock:
            while not self._is_unfit:
                process, control = await self._running(launch.environment)
                if (child := await self._ask(process, control, launch, timeout_s)) is not None:
                    self._has_forked = True
                    return child
                await kill(process)  # or it might still fork this child, besides the one that starts instead
                then = "another one starts" if self._has_forked else "children start without it"
                logger.warning("the warm parent has ended (%s): %s", describe_exit(process.returncode), then)
                self._is_unfit = not self._has_forked
        return None

    async def _running(self, environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Return the warm parent with its socket, started if none runs."""
        if self._process is None or self._control is None or self._process.returncode is not None:
            if self._control is not None:
                self._control.close()
            self._control, theirs = _socket_pair()
            self._has_forked = False
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", _WARM_MODULE, "--fd", str(theirs.fileno()), pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL, env=dict(environment) | dict.fromkeys(THREAD_VARIABLES, "1"),
                )  # fmt: skip
        return self._process, self._control

    async def _ask(
        self, process: asyncio.subprocess.Process, control: socket.socket, launch: Launch, timeout_s: float
    ) -> Process | None:
        """Ask the warm parent for a child; `None` if it has ended, or does not answer in time."""
        limit_s = min(timeout_s, ANSWER_TIMEOUT_S) if self._has_forked else timeout_s
        num_threads = int(launch.environment[THREAD_VARIABLES[0]])
        request = json.dumps({"module": launch.module, "argv": launch.argv, "num_threads": num_threads}).encode()
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, _socket_pair())
            with theirs, contextlib.suppress(OSError):  # it has ended, which the missing answer tells as well
                socket.send_fds(control, [request], [launch.frames.fileno(), launch.log.fileno(), theirs.fileno()])
            with contextlib.suppress(ProcessError, ConnectionError):
                async with waiting(f"the warm parent (pid {process.pid}) to fork {launch.module}", limit_s):
                    if answer := await asyncio.get_running_loop().sock_recv(ours, 64):
                        on_failure.pop_all()
                        return ForkedProcess(int(answer), ours, process)
        return None

    async def close(self) -> None:
        """End the warm parent. Its children should have been closed before: they are killed with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            await until_exit(self._process)


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Starts children on this machine, each at the other end of a socket pair."""

    warm_parent: WarmParent | None = None
    """Forks them, if it can; only for children that compute on the CPU."""

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, socket.socketpair())
            with theirs, open_log(program.log_path) as log:
                launch = Launch(
                    module=program.module, argv=["--log", str(program.log_path)], frames=theirs, log=log,
                    environment=child_environment(program.num_threads, program.variables),
                )  # fmt: skip
                process = await self.warm_parent.fork(launch, timeout_s) if self.warm_parent is not None else None
                if process is None:
                    process = await launch.start()
            on_failure.pop_all()
        await client.connect(ours)
        return process

    async def close(self) -> None:
        """Do nothing: the warm parent is the server's."""


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages; the first for use with asyncio."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


async def _until_gone(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has taken notice."""
    assert sys.platform == "linux"
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def until_exit(process: Process) -> None:
    """Wait for a process that was asked to exit, and kill it if it does not."""
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def abort(process: Process) -> None:
    """Let a process write where it stands, then kill it. One that is stopped or starved writes nothing."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.send_signal(signal.SIGABRT)
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await process.wait()
    await kill(process)


async def kill(process: Process) -> None:
    """Kill a process and wait for its end, but not for ever: the system cannot end a process that waits for a disk."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        async with waiting(f"the end of process {process.pid}, which was killed", 2 * ANSWER_TIMEOUT_S):
            await process.wait()
    except ProcessError as error:
        logger.error("%s. The server goes on without it", error)
