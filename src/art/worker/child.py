"""What every engine and trainer process has: messages (frames) in and out, a heartbeat, and an end with its parent.

A child is started as `python -m art.worker.<name>_child --fd N --log FILE ...`, where N is its end of a
socket pair and FILE receives its stderr. The main thread works, and reads frames when it has time for them: a thread
that reads would interrupt its steps. One thread waits for the end of the parent; another sends a heartbeat that says
how long ago the main thread last called `tick`. SIGABRT ends the process, with the stack of its main thread on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from art.protocol.rpc import RpcServerSocket
from art.storage.logs import log_to_stderr

HEARTBEAT_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Child:
    """The connection of this child process to the server, with its heartbeat. For use by the main thread."""

    def __init__(self, sock: socket.socket, log_path: Path | None = None) -> None:
        self.socket = RpcServerSocket(sock)
        self.log_path = log_path
        """File that receives the process's stderr, if any."""
        self._last_tick = time.monotonic()
        self._doing = "starting"

    def start(self) -> None:
        """Start the threads that wait for the parent's end and send heartbeats."""

        def await_end() -> None:
            self.socket.until_hang_up()
            _leave()

        def beat() -> None:
            while True:
                since_s = time.monotonic() - self._last_tick
                self.socket.heartbeat({"doing": self._doing, "since_s": since_s, "rss_bytes": rss_bytes(os.getpid())})
                time.sleep(HEARTBEAT_S)

        die_with_parent()
        threading.Thread(target=await_end, name="end", daemon=True).start()
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def tick(self, doing: str) -> None:
        """Report that the main thread is alive and what it does next: `idle`, or a few words."""
        self._last_tick = time.monotonic()
        self._doing = doing

    def read(self) -> dict[str, Any]:
        """Wait for the next frame. The process ends if the parent is gone."""
        if (frame := self.socket.read()) is None:
            _leave()
        return frame


def _leave() -> NoReturn:
    os._exit(0)  # the parent is gone, and nothing needs saving: checkpoints are written by rename


def rss_bytes(pid: int, *, with_children: bool = True) -> int | None:
    """Return the resident memory of a process, by default with all its descendants, from Linux's /proc.

    `None` on other systems, and for a process that is gone.
    """
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None
    if not with_children:
        return own
    children: list[str] = []
    with contextlib.suppress(OSError):  # some kernels do not have this file
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return own + sum(rss_bytes(int(child)) or 0 for child in children)


def import_transformers() -> None:
    """Import torch and transformers with the garbage collector paused.

    Their objects live as long as the process. Searching them for garbage again and again would take a quarter of the
    start, and a third of a second in each later full collection, so the collector also leaves them out afterwards.
    """
    gc.disable()
    try:
        importlib.import_module("transformers.modeling_utils")  # otherwise imported with the first model
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies. Elsewhere the process ends a little later, with its socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C and the end of the terminal, which reach its whole group. The parent decides what they mean."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def dump_stack_on_abort() -> None:
    """Write the main thread's stack to stderr when a signal ends this process, and no core file."""
    # Not of all threads: reading a stack while its thread runs has ended processes with a segmentation fault.
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def child_from_argv(name: str) -> Child:
    """Connect this child process to its parent, as its command line says, and set up its name, logging and signals."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log", type=Path, help="the file that stderr is")
    args = parser.parse_args()
    if sys.platform == "linux":  # for `ps` and `top`: the command line of a fork is that of the warm parent
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    log_to_stderr()
    sys.stdout = sys.stderr  # libraries may print
    ignore_ctrl_c()
    dump_stack_on_abort()
    child = Child(socket.socket(fileno=args.fd), args.log)
    child.start()
    return child
