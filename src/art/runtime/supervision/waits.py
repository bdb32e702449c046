"""What tasks and child processes wait for: waits of the server's tasks, each with a description and a deadline, and the
stacks of asyncio tasks and of the main threads of child processes.

    async with waiting("the trainer of ...", 60.0): ...

A wait for the answer of a child process is a `PendingCall` of its connection and does not appear here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import AsyncGeneratorType, CodeType, CoroutineType, GeneratorType
from typing import Any

from art.errors import ProcessError
from art.runtime.children.child import STACKS_SIGNAL
from art.storage.logs import log_since, log_size


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    who: str
    """Name of the asyncio task."""
    what: str
    since: float
    """Start of the wait, by `time.monotonic()`."""
    within_s: float

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what}, for {self.age_s():.0f} of {self.within_s:g} s"

    def age_s(self) -> float:
        return time.monotonic() - self.since


_waits: set[Wait] = set()
"""All current waits of this process, which has one event loop."""


@contextlib.asynccontextmanager
async def waiting(what: str, within_s: float) -> AsyncIterator[None]:
    """Wrap exactly one wait. The body must only wait for `what`.

    Raises:
        ProcessError: it took longer than `within_s`.
    """
    task = asyncio.current_task()
    wait = Wait(task.get_name() if task else "", what, time.monotonic(), within_s)
    _waits.add(wait)
    try:
        async with asyncio.timeout(within_s) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ProcessError(f"timed out after {within_s:g} s waiting for {what}") from None
    finally:
        _waits.discard(wait)


@contextlib.asynccontextmanager
async def acquired(lock: asyncio.Lock, what: str, within_s: float) -> AsyncIterator[None]:
    """Hold `lock` during the body. Getting it, described by `what`, may take at most `within_s`.

    Raises:
        ProcessError: the wait took longer.
    """
    async with waiting(what, within_s):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


def current_waits() -> list[Wait]:
    """All current waits, oldest first."""
    return sorted(_waits, key=lambda wait: wait.since)


DUMP_TIMEOUT_S = 2.0
"""Longest wait for stacks. A process writes them within milliseconds, unless it is stopped or starved."""
MAX_NAMES = 5


def task_stacks() -> str:
    """Describe what each task of the running event loop awaits, outermost first; equal tasks appear once."""
    tasks = asyncio.all_tasks()
    places: dict[str, list[str]] = {}
    for task in tasks:
        places.setdefault(_await_chain(task), []).append(task.get_name())
    parts = []
    for place, names in sorted(places.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(sorted(names)[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        parts.append(f"{len(names)} at this place: {shown}\n{place}" if len(names) > 1 else f"{shown}\n{place}")
    return "\n\n".join(parts)


def _await_chain(task: asyncio.Task[Any]) -> str:
    lines = []
    waited: Any = task.get_coro()
    while waited is not None:
        code, line, inner = _frame_of(waited)
        if code is None:
            lines.append(f"    waits for {_describe(waited)}")
            break
        lines.append(f"    {code.co_filename}:{line} in {code.co_qualname}")
        waited = inner
    return "\n".join(lines)


def _frame_of(waited: Any) -> tuple[CodeType | None, int, Any]:
    """Return the code and line at which a coroutine is suspended, and the object that it awaits there."""
    if isinstance(waited, CoroutineType):
        frame, inner = waited.cr_frame, waited.cr_await
    elif isinstance(waited, GeneratorType):
        frame, inner = waited.gi_frame, waited.gi_yieldfrom
    elif isinstance(waited, AsyncGeneratorType):
        frame, inner = waited.ag_frame, waited.ag_await
    elif (generators := [one for one in gc.get_referents(waited) if isinstance(one, AsyncGeneratorType)]) != []:
        return _frame_of(generators[0])  # `waited` is one step of this generator, which it does not name
    else:
        return None, 0, None
    return (None, 0, None) if frame is None else (frame.f_code, frame.f_lineno, inner)


def _describe(waited: Any) -> str:
    if isinstance(waited, asyncio.Task):
        return f"task {waited.get_name()}"
    return type(waited).__name__


def dump_stacks(status: Mapping[str, Any]) -> str:
    """Make the processes of a child write their stacks into their logs, and return what they wrote.

    Blocks for at most `DUMP_TIMEOUT_S`.

    Args:
        status: the status of a `ChildProcess`. Its heartbeat lists the processes that handle the signal, which would
            kill any other process.
    """
    asked = []
    for pid, log in status.get("dumps_stacks", ()):
        path = Path(log)
        asked.append((pid, path, log_size(path), process_state(pid)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + DUMP_TIMEOUT_S
    waiting = [path for _, path, _, state in asked if state not in ("T", "Z", None)]
    sizes: Counter[Path] = Counter()
    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)
        before, sizes = sizes, Counter({path: log_size(path) for path in waiting})
        if before == sizes and all(sizes[path] > size for _, path, size, _ in asked if path in waiting):
            break
    parts = []
    for pid, path, size, state in asked:
        text = log_since(path, size).strip()
        if state == "T":
            text = "it is stopped by a signal (SIGCONT lets it go on)"
        parts.append(f"process {pid}, state {state}, log {path}\n{text or 'it did not answer'}")
    return "\n\n".join(parts)


def process_state(pid: int) -> str | None:
    """Return the state letter of Linux's /proc: R runs, S waits, D waits for a device, T stopped.

    `None` on other systems, or if the process is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
