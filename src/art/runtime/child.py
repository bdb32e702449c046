"""The inside of an engine or trainer process: frames in, frames out, a heartbeat, and never outliving the parent.

A child is started as `python -m art.runtime.<name>_child --fd N`, where N is its end of a socket pair. Its log is its
stderr, which the parent sends to a file. The main thread does the work; one thread reads frames into `inbox`, another
sends a heartbeat that tells how long ago the main thread last said `tick`.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

from art.protocol.rpc import RpcServerSocket

HEARTBEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


class Child:
    """This process, seen from its main thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = RpcServerSocket(sock)
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
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
                    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }
            )
            time.sleep(HEARTBEAT_S)


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


def child_from_argv(name: str) -> Child:
    """Set up logging and the connection from the command line of a child process."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--fd", type=int, required=True)
    fd = parser.parse_args().fd
    log_to_stderr()
    ignore_ctrl_c()
    child = Child(socket.socket(fileno=fd))
    child.start()
    return child
