"""The server's report on itself, for people. It is written on a signal, and logged when nothing moves for a while.

SIGUSR1   the event loop writes a report to `logs/report.txt`, which `art status` shows
SIGUSR2   a handler in C writes the stack of the main thread, which runs the event loop, to `logs/server-stacks.log`;
          it works while the loop is blocked

Progress is an answer of a child process, or new work of its main thread. The log reports a child that keeps a caller
waiting without progress, and a wait inside the server while no child works at all.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from art.runtime.supervision.process import ChildProcess
from art.runtime.supervision.waits import current_waits, dump_stacks, task_stacks
from art.storage.atomic import write_file
from art.storage.layout import DataDir
from art.storage.log_lines import clean, known_secrets

logger = logging.getLogger(__name__)


STACKS_HEADING = "Stacks"
"""Heading of the last part, which few readers need."""
MAX_WAITS = 40


async def write_report(
    processes: Sequence[ChildProcess], jobs: Iterable[str], ignored: Mapping[tuple[str, str], int]
) -> str:
    """Write the current report. Takes `stacks.DUMP_TIMEOUT_S` if a process does not answer.

    Args:
        ignored: how many requests of a key had a field that has no effect.
    """
    fields = [f"`{name}` of key {key!r}: {count} requests" for (key, name), count in sorted(ignored.items())]
    waits = [str(wait) for wait in current_waits()] + [
        wait for process in processes for wait in describe_waits(process)
    ]
    more = [f"... and {len(waits) - MAX_WAITS} more"] if len(waits) > MAX_WAITS else []
    stacks = [_section(f"{STACKS_HEADING}: tasks of art-server", task_stacks().splitlines())]
    dumps = await asyncio.gather(*(asyncio.to_thread(dump_stacks, process.status) for process in processes))
    for process, text in zip(processes, dumps, strict=True):
        stacks.append(_section(f"{STACKS_HEADING}: {process.spec.name}", text.splitlines()))
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return "\n\n".join(
        [
            f"art-server, pid {os.getpid()}, at {now}",
            _section("Processes", [_describe(process) for process in processes]),
            _section("Training jobs", jobs),
            _section("Who waits for whom", waits[:MAX_WAITS] + more),
            _section("Fields of requests that have no effect", fields),
            *stacks,
        ]
    )


def describe_waits(process: ChildProcess) -> list[str]:
    """List who waits for this child, and what it does meanwhile."""
    status, name, now = process.status, process.spec.name, time.monotonic()
    lines = []
    if process.num_waiting:
        lines.append(f"{process.num_waiting} callers wait for the {name}, which is {status['state']}")
    doing = (
        f"it does `{status['doing']}` since {status['since_s']:.0f} s" if "doing" in status else "it has said nothing"
    )
    for call in process.pending:
        waited_s = now - call.since
        lines.append(f"{call.caller} waits for the {name} to answer `{call.method}`, for {waited_s:.0f} s; {doing}")
    return lines


def _section(heading: str, lines: Iterable[str]) -> str:
    return "\n".join([heading, *(f"  {line}" for line in list(lines) or ["none"])])


def _describe(process: ChildProcess) -> str:
    status = process.status
    parts = [f"{process.spec.name}: {status['state']}"]
    if status["pid"] is not None:
        parts.append(f"pid {status['pid']}")
    if process.spec.place:
        parts.append(f"on {process.spec.place}")
    if status.get("rss_bytes") is not None:  # unknown where there is no /proc, as on macOS
        parts.append(f"{status['rss_bytes'] / 2**30:.2f} GiB")
    if "doing" in status:
        parts.append(f"`{status['doing']}` since {status['since_s']:.0f} s")
    if "vllm" in status:
        parts.append(_describe_vllm(status["vllm"]))
    parts.append(f"log {process.spec.log_path}")
    if status["restarts"]:
        parts.append(f"{status['restarts']} restarts, the last since {status['last_end']}")
    return ", ".join(parts)


def _describe_vllm(status: dict[str, Any]) -> str:
    """Describe vLLM's share of the memory and its last progress."""
    parts = [] if status["rss_bytes"] is None else [f"{status['rss_bytes'] / 2**30:.2f} GiB"]
    if "progress_s" in status:
        parts.append(
            f"{status['running']:.0f} requests running and {status['waiting']:.0f} waiting, KV cache "
            f"{status['kv_cache_usage']:.0%} full, {status['generated_tokens']:,.0f} tokens sampled, the last progress "
            f"{status['progress_s']:.0f} s ago"
        )
    return f"of it vLLM: {', '.join(parts) or 'nothing known yet'}"


CHECKS_PER_REPORT = 20
"""Number of checks within `after_s`, the time without progress after which a report is due."""


class Watchdog:
    """Logs a report after `after_s` without progress, and again when the wait has doubled. `run` needs its own task."""

    def __init__(
        self, processes: Callable[[], list[ChildProcess]], report: Callable[[], Awaitable[str]], after_s: float = 60.0
    ) -> None:
        self._processes = processes
        self._report = report
        self._after_s = after_s
        self._last_busy = time.monotonic()

    async def run(self) -> None:
        due_s = self._after_s
        while True:
            await asyncio.sleep(self._after_s / CHECKS_PER_REPORT)
            stalled_s = self._stalled_s()
            if stalled_s < self._after_s:
                due_s = self._after_s
            elif stalled_s >= due_s:
                due_s = 2 * stalled_s
                try:
                    logger.warning("no progress for %.0f s\n%s", stalled_s, await self._report())
                except Exception:  # the next report may work
                    logger.exception("no progress for %.0f s, and no report", stalled_s)

    def _stalled_s(self) -> float:
        processes, now = self._processes(), time.monotonic()
        if any(process.pending or process.num_waiting for process in processes):
            self._last_busy = now
        waits = current_waits()
        without_children_s = min(now - self._last_busy, waits[0].age_s()) if waits else 0.0
        return max([without_children_s, *(process.stalled_s() for process in processes)])


REPORT_SIGNAL, STACKS_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
BLOCKED_AFTER_S = 60.0
_ARM_S = 5.0


class ServerWatch:
    """Lets a server write its report and stacks on signals, and when it is blocked. `run` needs its own task."""

    def __init__(self, data_dir: DataDir, report: Callable[[], Awaitable[str]]) -> None:
        self._data_dir = data_dir
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._stacks: TextIO | None = None

    def install(self) -> None:
        """Handle the signals. Must come before others can find this process, because unhandled signals would end it."""
        self._data_dir.logs.mkdir(parents=True, exist_ok=True)
        self._stacks = self._data_dir.server_stacks.open("a", encoding="utf-8")
        faulthandler.enable()
        # The kernel gives the signal to the main thread. The stacks of other threads cannot be read safely while they
        # run: that has ended servers with a segmentation fault.
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=False)
        asyncio.get_running_loop().add_signal_handler(REPORT_SIGNAL, self._on_report_signal)

    async def run(self) -> None:
        """Keep postponing the traceback that is written when the event loop is blocked."""
        while True:
            faulthandler.dump_traceback_later(BLOCKED_AFTER_S, repeat=True)
            await asyncio.sleep(_ARM_S)

    def _on_report_signal(self) -> None:
        task = asyncio.create_task(self._write(), name="report")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        try:
            text = await self._report()
            await asyncio.to_thread(write_file, self._data_dir.report, clean(text, known_secrets()).encode())
        except Exception:
            logger.exception("the report could not be written")


def end_within(seconds: float) -> None:
    """Kill this process, and its children with it, unless it ends by itself within `seconds`."""

    def wait() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"art-server did not end within {seconds:.0f} s; the stacks of its threads:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    threading.Thread(target=wait, name="end", daemon=True).start()
