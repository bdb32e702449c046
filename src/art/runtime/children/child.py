"""The inside of an engine or trainer process: frames in, frames out, a heartbeat, and never outliving the parent.

A child is started as `python -m art.runtime.<name>_child --fd N --log FILE ...`, where N is its end of a socket pair
and FILE is where its stderr goes. The main thread does the work; one thread reads frames into `inbox`, another sends a
heartbeat that tells how long ago the main thread last said `tick`. On `STACKS_SIGNAL` the stacks of all threads go to
stderr, whatever the process is doing at the time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.protocol.rpc import RpcServerSocket

HEARTBEAT_S = 1.0
DEFAULT_SILENCE_S = ServerConfig().heartbeat_timeout_s
STACKS_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


class Child:
    """This process, seen from its main thread."""

    def __init__(
        self, sock: socket.socket, log_path: Path | None = None, heartbeat_timeout_s: float = DEFAULT_SILENCE_S
    ) -> None:
        self.socket = RpcServerSocket(sock)
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log_path = log_path
        """Where its stderr goes, if that is a file."""
        self.heartbeat_timeout_s = heartbeat_timeout_s
        """How long a process may be silent, those that this one has started included."""
        self.helpers: dict[int, Path | None] = {}
        """Further processes that this one has started and that write their stacks on `STACKS_SIGNAL`: pid to log."""
        self.details: dict[str, Any] = {}
        """More for the heartbeat, by name."""
        self._last_tick = time.monotonic()
        self._doing = "starting"

    def start(self) -> None:
        die_with_parent()
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def tick(self, doing: str) -> None:
        """Say that the main thread is alive, and what it does next: `idle`, or a few words."""
        self._last_tick = time.monotonic()
        self._doing = doing

    def _read(self) -> None:
        while (frame := self.socket.read()) is not None:
            self.inbox.put(frame)
        os._exit(0)  # the parent is gone; nothing here is worth saving, checkpoints are written by rename

    def _beat(self) -> None:
        while True:
            self.socket.heartbeat(
                {
                    "doing": self._doing,
                    "since_s": time.monotonic() - self._last_tick,
                    "rss_bytes": rss_bytes(os.getpid()),
                    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    "dumps_stacks": [
                        [pid, str(log)]
                        for pid, log in {os.getpid(): self.log_path, **self.helpers}.items()
                        if log is not None
                    ],
                    **self.details,
                }
            )
            time.sleep(HEARTBEAT_S)


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process and of all that it has started, by Linux's /proc; `None` elsewhere, and for one that
    is gone."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None
    children: list[str] = []
    with contextlib.suppress(OSError):  # a kernel may be built without it
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(rss_bytes(int(child)) or 0 for child in children)


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies. Elsewhere the end of the socket does it, a little later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def log_to_stderr(prefix: str = "") -> None:
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=prefix + line)


def ignore_ctrl_c() -> None:
    """It reaches the whole terminal group; the parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def dump_stacks_on_signal() -> None:
    """The main thread's, by a handler in C: it works while that is deep in a library, or waits for ever."""
    faulthandler.enable()
    # Those of other threads cannot be read safely while they run: that ends processes with a segmentation fault.
    faulthandler.register(STACKS_SIGNAL, all_threads=False)


def child_from_argv(name: str) -> Child:
    """Set up logging and the connection from the command line of a child process."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log", type=Path, help="the file that stderr is")
    parser.add_argument("--heartbeat-timeout", type=float, default=DEFAULT_SILENCE_S, metavar="S")
    args = parser.parse_args()
    log_to_stderr()
    ignore_ctrl_c()
    dump_stacks_on_signal()
    child = Child(socket.socket(fileno=args.fd), args.log, args.heartbeat_timeout)
    child.start()
    return child
