"""What every engine and trainer process has: messages (frames) in and out, a heartbeat, and an end with its parent.

A child is started as `python -m art.runtime.children.<name>_child --fd N --log FILE ...`, where N is its end of a
socket pair and FILE receives its stderr. The main thread works. One thread reads frames into `inbox`, or waits for the
end of the parent where the main thread reads them itself; another sends a heartbeat that says how long ago the main
thread last called `tick`. On `STACKS_SIGNAL` the main thread's stack goes to stderr, whatever the process is doing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from art.config import ServerConfig
from art.kernels.process import peak_rss_bytes
from art.protocol.frames.rpc_child import RpcServerSocket
from art.storage.log_lines import log_to_stderr

HEARTBEAT_S = 1.0
DEFAULT_SILENCE_S = ServerConfig().heartbeat_timeout_s
STACKS_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class SocketInbox:
    """Frames that the main thread reads itself, when it has time for them: no other thread interrupts its work."""

    def __init__(self, sock: RpcServerSocket) -> None:
        self._socket = sock

    def get(self) -> dict[str, Any]:
        """Wait for the next frame. The process ends if the parent is gone."""
        if (frame := self._socket.read()) is None:
            _leave()
        return frame

    def empty(self) -> bool:
        return not self._socket.has_frame()


class Child:
    """The connection of this child process to the server, with its inbox and heartbeat. For use by the main thread."""

    def __init__(
        self, sock: socket.socket, log_path: Path | None = None, heartbeat_timeout_s: float = DEFAULT_SILENCE_S
    ) -> None:
        self.socket = RpcServerSocket(sock)
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log_path = log_path
        """File that receives the process's stderr, if any."""
        self.heartbeat_timeout_s = heartbeat_timeout_s
        """How long this process, and those that it has started, may be silent before they are killed."""
        self.helpers: dict[int, Path | None] = {}
        """Logs, by pid, of processes that this one has started and that write their stacks on `STACKS_SIGNAL`."""
        self.details: dict[str, Any] = {}
        """Additional values for the heartbeat, by name."""
        self._last_tick = time.monotonic()
        self._doing = "starting"

    def start(self, *, reads: bool = True) -> None:
        """Start the threads. With `reads`, one of them puts the frames that come into `inbox`."""
        die_with_parent()
        threading.Thread(target=self._read if reads else self._await_end, name="frames", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def tick(self, doing: str) -> None:
        """Report that the main thread is alive and what it does next: `idle`, or a few words."""
        self._last_tick = time.monotonic()
        self._doing = doing

    def _read(self) -> None:
        while (frame := self.socket.read()) is not None:
            self.inbox.put(frame)
        _leave()

    def _await_end(self) -> None:
        self.socket.until_hang_up()
        _leave()

    def _beat(self) -> None:
        while True:
            self.socket.heartbeat(
                {
                    "doing": self._doing,
                    "since_s": time.monotonic() - self._last_tick,
                    "rss_bytes": rss_bytes(os.getpid()),
                    "peak_rss_bytes": peak_rss_bytes(),
                    "dumps_stacks": [
                        [pid, str(log)]
                        for pid, log in {os.getpid(): self.log_path, **self.helpers}.items()
                        if log is not None
                    ],
                    **self.details,
                }
            )
            time.sleep(HEARTBEAT_S)


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


def dump_stacks_on_signal() -> None:
    """Write the main thread's stack on a signal. The handler in C works even while the thread is stuck in a library."""
    faulthandler.enable()
    # Not of all threads: reading a stack while its thread runs has ended processes with a segmentation fault.
    faulthandler.register(STACKS_SIGNAL, all_threads=False)


def child_from_argv(name: str, *, reads: bool = True) -> Child:
    """Connect this child process to its parent, as its command line says, and set up its name, logging and signals.

    With `reads`, a thread puts the frames that come into `Child.inbox`.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log", type=Path, help="the file that stderr is")
    parser.add_argument("--heartbeat-timeout", type=float, default=DEFAULT_SILENCE_S, metavar="S")
    args = parser.parse_args()
    if sys.platform == "linux":  # for `ps` and `top`: the command line of a fork is that of the warm parent
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    log_to_stderr()
    sys.stdout = sys.stderr  # libraries may print
    ignore_ctrl_c()
    dump_stacks_on_signal()
    child = Child(socket.socket(fileno=args.fd), args.log, args.heartbeat_timeout)
    child.start(reads=reads)
    return child
