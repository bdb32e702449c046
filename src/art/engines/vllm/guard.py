"""Run a vLLM server so that none of its processes outlives the process that started it.

    python guard.py COMMAND ...

A vLLM server is a tree of processes, and when one is killed its children live on. This program runs the server in the
guard's process group. It kills the whole group when the server ends, and when standard input closes, which happens
when the process that started the guard ends. It is run as a file and imports nothing of ART.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what to do
    signal.signal(signal.SIGTERM, _end_group)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_input, daemon=True).start()
    status = server.wait()
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    sys.stderr.write(f"the vLLM server ended ({how})\n")
    sys.stderr.flush()
    _end_group()


def _die_with_parent() -> None:
    """Kill the server if this guard is killed. It runs in the server's process before the server starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    _end_group()


def _end_group(*_: object) -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
