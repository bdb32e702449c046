"""What a supervisor knows of a running child: its heartbeat and the conclusions from it.

    heartbeat {"doing": "step", "since_s": 0.2, "rss_bytes": ..., ...}  -->  is it stuck?  since when?  does it leak?

`doing` is `idle` or what the main thread works on; `since_s` is how long ago it last said so. This module only keeps
books, and `process.py` acts on them. Times are readings of `time.monotonic`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.protocol.rpc import PendingCall
from art.runtime.supervision.memory_watch import MemoryWatch

FIRST_HEARTBEAT_S = 60.0
"""Least time a process gets for its first heartbeat, since the interpreter starts slowly on a busy machine."""


class Vitals:
    """What is known of one child process: its newest heartbeat, when that came, and its memory."""

    def __init__(self, limits: ServerConfig, pid: int) -> None:
        self._limits = limits
        self._pid = pid
        self._memory = MemoryWatch(limits.memory)
        self._last_heartbeat = self._last_tick = self._heard_at = time.monotonic()
        self.is_ready = False
        """Whether the process has loaded its model. Until then `child_start_timeout_s` limits it."""
        self.heartbeat: dict[str, Any] = {}
        """The newest heartbeat; empty before the first."""

    def on_heartbeat(self, heartbeat: dict[str, Any]) -> None:
        now = time.monotonic()
        self._last_heartbeat = self._heard_at = now
        self._last_tick = now - heartbeat.get("since_s", 0.0)
        self.heartbeat = heartbeat
        if self.is_ready and (rss_bytes := heartbeat.get("rss_bytes")):
            self._memory.add(rss_bytes, idle=self.doing == "idle", now=now)

    def extend_deadlines(self, late_s: float) -> None:
        """Give the child more time, because the supervisor itself was blocked and has not read its heartbeats yet."""
        self._last_heartbeat += late_s

    @property
    def doing(self) -> str:
        return str(self.heartbeat.get("doing", "starting"))

    def stuck(self, pending: Sequence[PendingCall]) -> str | None:
        """Explain why the running child counts as stuck: it is silent, makes no progress, or owes an answer.

        Returns `None` if it is not stuck. `pending` has the calls that it has not answered.
        """
        now = time.monotonic()
        silent_s, same_s = now - self._last_heartbeat, now - self._last_tick
        if silent_s > max(self._limits.heartbeat_timeout_s, 0.0 if self.heartbeat else FIRST_HEARTBEAT_S):
            return f"it was silent for {silent_s:.0f} s{self._state()}"
        if self.is_ready and self.doing != "idle" and same_s > self._limits.stall_timeout_s:
            return f"it made no progress for {same_s:.0f} s ({self.doing})"
        # An idle child has answered every call that it has read. If it still sends heartbeats this long after a call,
        # the missing answer will never come. A silent child may not have read the call.
        owed = [call for call in pending if self._heard_at - call.last_frame > self._limits.heartbeat_timeout_s]
        if owed and self.heartbeat and self.doing == "idle" and same_s > self._limits.heartbeat_timeout_s:
            return f"it owes an answer to `{owed[0].method}` for {now - owed[0].last_frame:.0f} s, and is idle"
        return None

    def memory_problem(self) -> str | None:
        return self._memory.problem()

    def is_idle(self, pending: Sequence[PendingCall]) -> bool:
        return not pending and self.doing == "idle"

    def stalled_s(self, pending: Sequence[PendingCall]) -> float:
        """Seconds for which callers have waited for this child without any progress; 0 if none waits."""
        if not pending:
            return 0.0
        now = time.monotonic()
        last_event = max(self._last_tick, *(call.last_frame for call in pending))
        return now - max(last_event, min(call.since for call in pending))

    def _state(self) -> str:
        if process_state(self._pid) == "T":
            return " (a signal has stopped it)"
        return f" ({self.doing})" if self.doing != "idle" else ""


def process_state(pid: int) -> str | None:
    """Return the state letter of Linux's /proc: R runs, S waits, D waits for a device, T stopped.

    `None` on other systems, or if the process is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
