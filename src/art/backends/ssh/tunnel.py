"""`Tunnel`: a port of this machine that leads to a port on the loopback of another machine, kept alive.

A thread watches the ssh process, so that the tunnel serves any event loop, and returns while one is blocked. The ssh
process runs `cat` on the other machine and reads from a pipe that only this process holds: if this process dies in any
way, `cat` and ssh end too. (`ssh -N` would go on for ever.)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import re
import socket
import subprocess
import threading
import time
from typing import IO

from art.backends.ssh.ssh import Ssh, in_sh
from art.errors import MachineError, UnreachableError
from art.protocol.exits import describe_exit

logger = logging.getLogger(__name__)

_OPEN = "art-tunnel-open"
_COMMAND = in_sh(f"echo {_OPEN} >&2; echo {_OPEN}; exec cat > /dev/null")
"""It says that it runs on both outputs: all that ssh itself had to say then came before, on its error output."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 10.0
"""Seconds before the first new connection, doubled up to the longest while connections fail."""
CONNECT_DEADLINE_S = 40.0
"""Seconds after which an ssh process that has neither connected nor failed is ended."""
_NOT_SHARED = ("-o", "ControlPath=none")
"""A connection that others share would keep the local port when the tunnel's own process ends."""
_SAID_S = 30.0
"""Seconds for the error output to come as far as the standard output."""


_FAILED_FORWARD = re.compile(r"cannot listen to port: \d+|remote port forwarding failed for listen (?:port|path)")


class Tunnel:
    """A supervised `ssh -L`. Its local address stays the same while connections die and come back."""

    def __init__(self, ssh: Ssh, remote_port: int, *, local_port: int | None = None) -> None:
        """
        Args:
            remote_port: port on the loopback (127.0.0.1) of the other machine.
            local_port: port on the loopback of this machine; by default a free one.
        """
        self.ssh = ssh
        self.local_port = local_port or free_port()
        self.num_opened = 0
        """How often the tunnel was opened: once, and once more after each break."""
        self.problem: str | None = None
        """Why the tunnel is not open, as far as that is known."""
        self._last_error: MachineError | None = None
        self._said = ""
        """The last words of the ssh process that ended last."""
        self._remote_port = remote_port
        self._chooses_port = local_port is None
        self._is_tolerant = False
        """Whether forwards of the user's configuration may fail, such as those that a terminal holds already."""
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_open, self._is_closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Address on this machine at which the server of the other machine answers."""
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    @property
    def remote_port(self) -> int:
        return self._remote_port

    @property
    def pid(self) -> int | None:
        """Process id of the ssh process; `None` between two of them."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    async def open(self, *, timeout_s: float = 60.0) -> None:
        """Open the tunnel, and keep it open until `close`.

        Raises:
            ConfigError: there is no ssh program.
            MachineError, UnreachableError: it could not be opened within `timeout_s` seconds. It is closed again.
        """
        self.ssh.base_command()  # raises if there is no ssh program
        if self._thread is None:
            self._is_closing.clear()
            self._thread = threading.Thread(target=self._keep_open, name=f"tunnel-{self.ssh.name}", daemon=True)
            self._thread.start()
        deadline = time.monotonic() + timeout_s
        try:
            while not self.is_open:
                if isinstance(self._last_error, MachineError) and not self._last_error.transient:
                    raise self._last_error
                if time.monotonic() > deadline:
                    why = f": {self.problem}" if self.problem else ""
                    raise UnreachableError(f"no tunnel to {self.ssh.name} within {timeout_s:.0f} s{why}")
                await asyncio.sleep(0.02)
        except BaseException:
            await self.close()
            raise

    def retarget(self, remote_port: int) -> None:
        """Lead to another port of the other machine from now on. The local address stays."""
        with self._lock:
            if remote_port == self._remote_port:
                return
            self._remote_port = remote_port
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
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def _keep_open(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._is_closing.is_set():
            num_opened = self.num_opened
            why = self._connect_once()
            self._is_open.clear()
            if self._is_closing.is_set():
                return
            self.problem, self._last_error = why.message, why
            if self.num_opened > num_opened:
                logger.warning("the tunnel to %s broke (%s) and is opened again", self.ssh.name, self._said)
                delay_s = FIRST_DELAY_S
            elif self._has_no_port(why.message):
                if self._chooses_port and not self.num_opened:
                    self.local_port = free_port()  # another program took it meanwhile
                elif not self.num_opened:
                    self._last_error = MachineError(
                        f"port {self.local_port} of this machine is in use, perhaps by another `art launch tunnel`; "
                        "end what uses it, or choose another port"
                    )
            elif _FAILED_FORWARD.search(why.message) and not self._is_tolerant:
                self._is_tolerant = True
                continue
            self._is_closing.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _connect_once(self) -> MachineError:
        """Run one ssh process until it ends. Returns why it ended."""
        with self._lock:
            if self._is_closing.is_set():
                return MachineError("closed")
            forward = f"127.0.0.1:{self.local_port}:127.0.0.1:{self._remote_port}"
            strict = "no" if self._is_tolerant else "yes"
            options = ("-o", f"ExitOnForwardFailure={strict}", *_NOT_SHARED, "-L", forward)
            # A new session: Ctrl-C in the terminal reaches only this process, which then closes the tunnel.
            process = self._process = subprocess.Popen(
                [*self.ssh.base_command(*options), _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = _Errors(process.stderr)
        watchdog = threading.Timer(CONNECT_DEADLINE_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in process.stdout:
                if not line.rstrip().endswith(_OPEN) or self.is_open:  # start files of the shell may print, too
                    continue
                watchdog.cancel()
                if not errors.until_open() or self._has_no_port(errors.text):
                    process.kill()
                    break
                self.num_opened += 1
                self.problem, self._last_error = None, None
                self._is_open.set()
            process.wait()
        finally:
            watchdog.cancel()
            with contextlib.suppress(OSError):
                process.stdin.close()  # a helper process of ssh (ProxyCommand) may live on, and hold its error output
            errors.close()
            process.stdout.close()
        self._said = errors.text.strip().rpartition("\n")[2] or f"ssh ended: {describe_exit(process.returncode)}"
        return self.ssh.explain(errors.text or self._said)

    def _has_no_port(self, said: str) -> bool:
        return f":{self.local_port}: Address already in use" in said or f"to port: {self.local_port}\n" in said


class _Errors:
    """Reads the error output of an ssh process in a thread, and keeps its last lines."""

    def __init__(self, stderr: IO[str]) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=20)
        self._stderr = stderr
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self._lines.copy())

    def until_open(self) -> bool:
        """Wait until all has been read that ssh wrote before the command began on the other machine."""
        return self._is_open.wait(_SAID_S)

    def close(self) -> None:
        """Read what is left. A helper process of ssh may hold the output open: it is not waited for."""
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._stderr.close()

    def _read(self) -> None:
        for line in self._stderr:
            if line.rstrip().endswith(_OPEN):
                self._is_open.set()
            else:
                self._lines.append(line)
        self._is_open.set()  # ssh has ended; nobody needs to wait


def free_port() -> int:
    """Return a port of this machine's loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
