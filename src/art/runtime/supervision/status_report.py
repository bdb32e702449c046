"""The server's report on itself, for people: which processes run, which jobs, and who waits for whom."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art.runtime.supervision.process import ChildProcess
from art.runtime.supervision.stacks import dump_stacks, task_stacks
from art.runtime.supervision.waits import current_waits

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
