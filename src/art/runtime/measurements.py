"""Measure jobs, processes, engines, tokens and disk for `/metrics`, engines for pipelines, and what keeps the server
from being ready. Keeps nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from pathlib import Path

from art.errors import ArtError, StorageError
from art.gateway.record.recorder import Recorder
from art.protocol.answers import EnginePressure, Measurement
from art.runtime.host import BaseModelHost

ENGINE_TIMEOUT_S = 1.0
"""Longest wait for the counters of an engine. An engine that takes longer is left out of the scrape."""
_GAUGES = {"running": "art_engine_running", "waiting": "art_engine_waiting", "adapters": "art_engine_adapters"}
_COUNTERS = {
    "generated_tokens": "art_engine_generated_tokens_total",
    "prefill_tokens": "art_engine_prefill_tokens_total",
    "cached_tokens": "art_engine_cached_tokens_total",
    "steps": "art_engine_steps_total",
    "step_s": "art_engine_step_seconds_total",
    "preemptions": "art_engine_preemptions_total",
}


async def measure_engines(hosts: Iterable[BaseModelHost]) -> list[Measurement]:
    """Ask the running engines for their counters and gauges."""
    by_host = await asyncio.gather(*map(_measure_engine, hosts))
    return [measurement for measurements in by_host for measurement in measurements]


async def engine_stats(host: BaseModelHost) -> dict[str, float]:
    """Return the numbers of an engine; none if it is not up or does not answer within `ENGINE_TIMEOUT_S`."""
    if host.engine_process.status["state"] != "up":
        return {}
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            return await host.engine.stats()
    except (TimeoutError, ArtError):
        return {}


async def engine_pressure(host: BaseModelHost, project: str) -> EnginePressure:
    """Return how busy the engine of `host` is for `project`. Pipelines ask about once a second, and it costs one
    question to the engine's process.

    The engine does not know projects. Of the requests that have a seat and still wait inside the engine, the project
    is counted with its share of the seats.
    """
    stats = await engine_stats(host)
    seats = host.engine.seats.of(project)
    inside = max(0.0, stats.get("waiting", 0.0) - host.engine.seats.num_waiting)
    stalled = min(seats.held, round(inside * seats.held / max(1, seats.held_by_all)))
    return EnginePressure(
        running=seats.held - stalled,
        waiting=seats.waiting + stalled,
        seats=seats.held + seats.free,
        kv_used_share=stats.get("kv_cache_usage"),
        asleep=not stats or host.engine.closed.lasts,
    )


async def _measure_engine(host: BaseModelHost) -> list[Measurement]:
    stats = await engine_stats(host)
    names = _GAUGES | _COUNTERS
    return [Measurement(names[key], value, {"engine": host.name}) for key, value in stats.items() if key in names]


def measure_processes(hosts: Iterable[BaseModelHost]) -> Iterator[Measurement]:
    for host in hosts:
        for process in (host.engine_process, host.trainer_process):
            status, labels = process.status, {"process": process.spec.name}
            yield Measurement("art_process_up", float(status["state"] == "up"), labels)
            yield Measurement("art_process_restarts_total", float(status["restarts"]), labels)
            if "rss_bytes" in status:
                yield Measurement("art_process_resident_bytes", float(status["rss_bytes"]), labels)


def measure_jobs(states: Mapping[str, int]) -> list[Measurement]:
    """Return the gauges of queued and running jobs. `states` has the number of jobs in each unfinished state."""
    return [Measurement("art_jobs", float(states.get(state, 0)), {"state": state}) for state in ("queued", "running")]


def measure_tokens(tokens: Counter[tuple[str, str]]) -> list[Measurement]:
    """Return the token counters of all models. `tokens` counts by (project/name, kind)."""
    return [
        Measurement("art_tokens_total", float(count), {"model": model, "kind": kind})
        for (model, kind), count in tokens.items()
    ]


def measure_disk(root: Path) -> Measurement:
    return Measurement("art_disk_free_bytes", float(shutil.disk_usage(root).free))


MIN_FREE_BYTES = 2**30
"""Free space for the data directory below which `/ready` reports that the server is not ready."""
WRITE_TIMEOUT_S = 5.0
"""Longest time for a test write to the database. It takes longer only when the disk hangs."""


async def find_obstacles(hosts: Iterable[BaseModelHost], recorder: Recorder, root: Path) -> dict[str, str]:
    """Describe what keeps the server from working, by the name of the check; empty if nothing does.

    Args:
        hosts: hosts of the base models that the server must always serve.
    """
    obstacles = {}
    for host in hosts:
        for process in (host.engine_process, host.trainer_process):
            if (state := process.status["state"]) != "up":
                obstacles[process.spec.name] = state
    if problem := await _problem(recorder.database.run(_write)):
        obstacles["database"] = problem
    elif problem := await _problem(recorder.check()):
        obstacles["recorder"] = problem
    try:
        free = shutil.disk_usage(root).free
    except FileNotFoundError:  # said under `database`
        return obstacles
    if free < MIN_FREE_BYTES:
        obstacles["disk"] = f"{free / 2**20:,.0f} MiB are free; at least {MIN_FREE_BYTES / 2**20:,.0f} are needed"
    return obstacles


def _write(db: sqlite3.Connection) -> None:
    # A real write, which a full or read-only disk refuses. It waits in the same queue as the writes of requests.
    db.execute("CREATE TABLE IF NOT EXISTS readiness (id INTEGER PRIMARY KEY, asked INTEGER NOT NULL)")
    db.execute("INSERT INTO readiness VALUES (0, 1) ON CONFLICT (id) DO UPDATE SET asked = asked + 1")


async def _problem(writing: Awaitable[None]) -> str | None:
    """What keeps a write from being done; `None` if nothing does."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writing
    except TimeoutError:
        return f"a write took longer than {WRITE_TIMEOUT_S:.0f} s"
    except StorageError as error:
        return error.message
    return None
