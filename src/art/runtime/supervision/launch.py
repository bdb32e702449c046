"""Starts a child process: forked by the warm parent of the server where that can be, otherwise in a new interpreter."""

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
from dataclasses import dataclass
from typing import IO, Protocol

from art.errors import ProcessError
from art.protocol.exits import describe_exit
from art.runtime.children.warm_parent import MODULES, THREAD_VARIABLES
from art.runtime.supervision.waits import waiting

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 3.0
"""Longest wait for a child to exit after its connection has ended."""
ANSWER_TIMEOUT_S = 10.0
"""Longest wait for what takes milliseconds: a fork, and the report that a child has ended."""
_WARM_MODULE = "art.runtime.children.warm_parent"


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that a supervisor uses."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


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
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


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
    """The warm parent of one server, which forks its children. It starts with the first child that it can fork.

    One that has ended is replaced with the next child. One that never forked a child is not: children then start in
    new interpreters.
    """

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._setting: tuple[Mapping[str, str], str] | None = None
        """The environment and the working directory that its forks share with it."""
        self._has_forked = False
        """Whether the current process has forked a child, so that another fork takes milliseconds."""

    async def fork(self, launch: Launch, timeout_s: float) -> Process | None:
        """Fork a child.

        Returns `None` where a new interpreter is needed: on other systems, for other modules and environments than
        those of the warm parent, and when the warm parent is not ready within `timeout_s` or has never forked a child.
        """
        if sys.platform != "linux" or launch.module not in MODULES:
            return None
        async with self._starting:
            process, control = await self._running(launch.environment)
        if process is None or control is None:
            return None
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, _socket_pair())
            with theirs, contextlib.suppress(OSError):  # it has ended, which the missing answer tells as well
                fds = [launch.frames.fileno(), launch.log.fileno(), theirs.fileno()]
                socket.send_fds(control, [_request(launch)], fds)
            answer, was_fit = b"", self._has_forked
            limit_s = min(timeout_s, ANSWER_TIMEOUT_S) if was_fit else timeout_s
            with contextlib.suppress(ProcessError, ConnectionError):
                async with waiting(f"the warm parent (pid {process.pid}) to fork {launch.module}", limit_s):
                    answer = await asyncio.get_running_loop().sock_recv(ours, 64)
            if answer:
                on_failure.pop_all()
                self._has_forked = True
                return ForkedProcess(int(answer), ours, process)
        await kill(process)  # or it might still fork this child, besides the one that starts instead
        then = "another one starts" if was_fit else "children start without it"
        logger.warning("the warm parent has ended (%s): %s", describe_exit(process.returncode), then)
        return await self.fork(launch, timeout_s) if was_fit else None

    async def _running(
        self, environment: Mapping[str, str]
    ) -> tuple[asyncio.subprocess.Process | None, socket.socket | None]:
        """Return the warm parent with its socket, started if there was none yet; `None` if it is of no use."""
        setting = {key: value for key, value in environment.items() if key not in THREAD_VARIABLES}, os.getcwd()
        if self._process is None or (self._process.returncode is not None and self._has_forked):
            if self._control is not None:
                self._control.close()
            self._control, theirs = _socket_pair()
            self._has_forked = False
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", _WARM_MODULE, "--fd", str(theirs.fileno()), pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL, env=setting[0] | dict.fromkeys(THREAD_VARIABLES, "1"),
                )  # fmt: skip
            self._setting = setting
        is_useful = self._process.returncode is None and self._setting == setting
        return (self._process, self._control) if is_useful else (None, None)

    async def close(self) -> None:
        """End the warm parent. Its children should have been closed before: they are killed with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            await until_exit(self._process)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages; the first for use with asyncio."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _request(launch: Launch) -> bytes:
    num_threads = int(launch.environment[THREAD_VARIABLES[0]])
    return json.dumps({"module": launch.module, "argv": launch.argv, "num_threads": num_threads}).encode()


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


async def kill(process: Process) -> None:
    """Kill a process and wait for its end, but not for ever: the system cannot end a process that waits for a disk."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        async with waiting(f"the end of process {process.pid}, which was killed", 2 * ANSWER_TIMEOUT_S):
            await process.wait()
    except ProcessError as error:
        logger.error("%s. The server goes on without it", error)
