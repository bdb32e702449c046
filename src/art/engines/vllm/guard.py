"""Runs a vLLM server so that no process of it outlives the one that started it.

    python guard.py COMMAND ...

A vLLM server is a tree of processes, and those below stay when the upper one is killed. So this program starts it in
its own process group, and kills the whole group when the server ends, or when standard input does, which is the end of
whoever started it. It is run as a file and imports nothing of ART.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; who started us decides
    signal.signal(signal.SIGTERM, lambda *_: _end_group())
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_wait_for_end_of_input, daemon=True).start()
    status = server.wait()
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    sys.stderr.write(f"the vLLM server ended ({how})\n")
    sys.stderr.flush()
    _end_group()


def _die_with_parent() -> None:
    """For the case that this guard is killed; nothing else runs in it before the server starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    _end_group()


def _end_group() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
