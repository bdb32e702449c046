"""How a process ended, in words."""

from __future__ import annotations

import contextlib
import signal


def describe_exit(returncode: int | None) -> str:
    """
    Args:
        returncode: as `subprocess` has it: negative for a signal, `None` for a process that runs.
    """
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit status {returncode}"
    name = ""
    with contextlib.suppress(ValueError):
        name = f", {signal.Signals(-returncode).name}"
    return f"signal {-returncode}{name}"
