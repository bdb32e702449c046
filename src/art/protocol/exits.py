"""`describe_exit` says in words how a process ended."""

from __future__ import annotations

import contextlib
import signal


def describe_exit(returncode: int | None) -> str:
    """Say how a process ended, e.g. "exit status 1" or "signal 9, SIGKILL".

    Args:
        returncode: `Popen.returncode`: negative for a signal, `None` while the process runs.
    """
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit status {returncode}"
    name = ""
    with contextlib.suppress(ValueError):
        name = f", {signal.Signals(-returncode).name}"
    return f"signal {-returncode}{name}"
