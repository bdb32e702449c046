"""`Tunnel`: a port of this machine that leads to a port on the loopback of another machine, kept alive.

A thread watches the ssh process, so that the tunnel serves any event loop, and returns while one is blocked. The ssh
process runs `cat` on the other machine and reads from a pipe that only this process holds: if this process dies in any
way, `cat` and ssh end too. (`ssh -N` would go on for ever.)
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import tempfile
import threading
import time

from art.backends.ssh.ssh import Ssh, end_process, in_sh
from art.errors import MachineError, UnreachableError
from art.protocol.exits import describe_exit

logger = logging.getLogger(__name__)

_OPEN = "art-tunnel-open"
_COMMAND = in_sh(f"echo {_OPEN}; exec cat > /dev/null")
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 10.0
"""Seconds before the first new connection, doubled up to the longest while connections fail."""
CONNECT_DEADLINE_S = 40.0
"""Seconds after which an ssh process that has neither connected nor failed is ended."""
_OPTIONS = (
    "-o", "ControlPath=none",  # a connection that others share would keep the local port when this process ends
    "-o", "ExitOnForwardFailure=no",  # ports of the user's configuration may be held by a terminal
)  # fmt: skip


class Tunnel:
    """A supervised `ssh -L`. Its local address stays the same while connections die and come back."""

    def __init__(self, ssh: Ssh, remote_port: int, *, local_port: int | None = None) -> None:
        """
        Args:
            remote_port: port on the loopback (127.0.0.1) of the other machine.
            local_port: port on the loopback of this machine; by default a free one.
        """
        self.ssh = ssh
        self.remote_port = remote_port
        """Port on the other machine; change it with `retarget`."""
        self.local_port = local_port or free_port()
        self.num_opened = 0
        """How often the tunnel was opened: once, and once more after each break."""
        self.problem: MachineError | None = None
        """Why the tunnel is not open, as far as that is known."""
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_open, self._is_closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Address on this machine at which the server of the other machine answers."""
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    async def open(self, *, timeout_s: float = 60.0) -> None:
        """Open the tunnel, and keep it open until `close`.

        Raises:
            ConfigError: there is no ssh program.
            MachineError, UnreachableError: it could not be opened within `timeout_s` seconds. It is closed again.
        """
        self.ssh.base_command()  # raises if there is no ssh program
        try:
            socket.create_server(("127.0.0.1", self.local_port)).close()
        except OSError as error:
            raise MachineError(
                f"port {self.local_port} of this machine is in use, perhaps by another `art launch tunnel`; end what "
                "uses it, or choose another port"
            ) from error
        self._is_closing.clear()
        self._thread = threading.Thread(target=self._keep_open, name=f"tunnel-{self.ssh.host}", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        try:
            while not self.is_open:
                if self.problem is not None and not self.problem.transient:
                    raise self.problem
                if time.monotonic() > deadline:
                    why = f": {self.problem.message}" if self.problem else ""
                    raise UnreachableError(f"no tunnel to {self.ssh.host} within {timeout_s:.0f} s{why}")
                await asyncio.sleep(0.02)
        except BaseException:
            await self.close()
            raise

    def retarget(self, remote_port: int) -> None:
        """Lead to another port of the other machine from now on. The local address stays."""
        with self._lock:
            if remote_port != self.remote_port:
                self.remote_port = remote_port
                self._is_open.clear()
                self._end_process()

    async def close(self) -> None:
        """End the tunnel, and wait for the end of its process."""
        thread, self._thread = self._thread, None
        with self._lock:
            self._is_closing.set()
            self._end_process()
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _end_process(self) -> None:
        if self._process is not None:
            end_process(self._process)

    def _keep_open(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._is_closing.is_set():
            num_opened = self.num_opened
            problem = self._connect_once()
            self._is_open.clear()
            if self._is_closing.is_set():
                return
            self.problem = problem
            if self.num_opened > num_opened:
                logger.warning("the tunnel to %s broke and is opened again: %s", self.ssh.host, problem)
                delay_s = FIRST_DELAY_S
            self._is_closing.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _connect_once(self) -> MachineError:
        """Run one ssh process until it ends. Returns why it ended."""
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._is_closing.is_set():
                    return MachineError("closed")
                forward = f"127.0.0.1:{self.local_port}:127.0.0.1:{self.remote_port}"
                # A new session: Ctrl-C in the terminal reaches only this process, which then closes the tunnel.
                process = self._process = subprocess.Popen(
                    [*self.ssh.base_command(*_OPTIONS, "-L", forward), _COMMAND], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                )  # fmt: skip
            watchdog = threading.Timer(CONNECT_DEADLINE_S, end_process, [process])
            watchdog.daemon = True
            watchdog.start()
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.rstrip().endswith(_OPEN.encode()):  # start files of the shell may print, too
                        watchdog.cancel()
                        self.num_opened += 1
                        self.problem = None
                        self._is_open.set()
            watchdog.cancel()
            errors.seek(0)
            return self.ssh.explain(errors.read().decode(errors="replace") or describe_exit(process.returncode))


def free_port() -> int:
    """Return a port of this machine's loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
