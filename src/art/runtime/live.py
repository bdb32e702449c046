"""What the whole server does, for people who watch: one model (`activity`) and everything (`system`)."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from art.errors import StorageError
from art.gateway.chat import Gateway
from art.protocol.answers import Measurement
from art.protocol.live import (
    Activity,
    ClusterPart,
    DiskPart,
    EnginePart,
    JobPart,
    ModelTokens,
    ProcessPart,
    ProcessState,
    SystemAnswer,
    SystemHistory,
)
from art.record.recorder import Recorder
from art.runtime.hosting.cluster import Cluster
from art.runtime.hosting.host import BaseModelHost, Hosts
from art.runtime.jobs.queue import JobQueue
from art.runtime.models import Models, engine_stats
from art.runtime.placement import find_devices
from art.worker.child import rss_bytes
from art.worker.process import ChildProcess

WINDOW_S = 60.0
"""Rates are means over at most this time."""
HISTORY_EVERY_S, HISTORY_POINTS = 20.0, 180
"""The last hour."""


class Rates:
    """Remembers counters by name. It works only when it is asked."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, counters: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Take the present counters, and return how much each grew per second; none in the first second.

        A counter that is new, or smaller than it was, has no rate: its process has started again.
        """
        now = time.monotonic() if now is None else now
        while self._samples and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            self._samples.append((now, counters))
            return {}
        at, earlier = self._samples[0]
        if now - self._samples[-1][0] >= 1.0:  # many viewers ask; one sample per second is enough
            self._samples.append((now, counters))
        if now - at < 1.0:  # a page that asks twice at once would see that nothing has grown
            return {}
        grown = {name: value - earlier[name] for name, value in counters.items() if name in earlier}
        return {name: growth / (now - at) for name, growth in grown.items() if growth >= 0}


class SystemFollower:
    """Notes every `HISTORY_EVERY_S` how a server does, for the curves of its last hour."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float, int, int]] = deque(maxlen=HISTORY_POINTS)
        """The fields of `SystemHistory`."""
        self._before: tuple[float, int, int] | None = None
        """Time, sampled tokens and trained tokens at the last point."""

    def note(self, sampled: int, trained: int, num_requests: int, rss: int, now: float | None = None) -> None:
        """Add a point. The counters are sums since the server began; the first call has no rates and adds none."""
        now = time.time() if now is None else now
        if self._before is not None and now > self._before[0]:
            at, sampled_before, trained_before = self._before
            sampled_rate, trained_rate = (
                round(max(0.0, count / (now - at)), 2) for count in (sampled - sampled_before, trained - trained_before)
            )
            self._points.append((round(now, 1), sampled_rate, trained_rate, num_requests, rss))
        self._before = now, sampled, trained

    def history(self) -> SystemHistory:
        columns = zip(*self._points, strict=True) if self._points else ()
        return SystemHistory(**dict(zip(SystemHistory.model_fields, map(list, columns), strict=False)))


class Overview:
    """Looks at the parts of one server. Any thread may call `activity`; `system` belongs to the event loop."""

    def __init__(
        self, models: Models, hosts: Hosts, jobs: JobQueue, gateway: Gateway, cluster: Cluster | None = None
    ) -> None:
        self._cluster = cluster
        self._models = models
        self._hosts = hosts
        self._jobs = jobs
        self._gateway = gateway
        self._live = gateway.live
        self._started_at = time.time()
        self._token_rates = Rates()
        self._follower = SystemFollower()

    async def follow(self) -> None:
        """Note how the server does until it ends."""
        while True:
            sampled = sum(count for (_, kind), count in self._gateway.tokens.items() if kind == "completion")
            rss = rss_bytes(os.getpid(), with_children=False) or 0
            rss += sum(process.status.get("rss_bytes") or 0 for host in self._hosts.all() for process in host.processes)
            self._follower.note(sampled, sum(self._jobs.trained.values()), len(self._live.running), rss)
            await asyncio.sleep(HISTORY_EVERY_S)

    def activity(self, project: str, name: str) -> Activity | None:
        """What happens for a model; `None` if the server does not have it."""
        model = self._models.by_key.get(f"{project}/{name}")
        if model is None:
            return None
        host = self._hosts.existing(model)
        running = list(self._live.running.values())
        requests = [one for one in running if (one.policy.project, one.policy.name) == (project, name)]
        is_told = bool(requests) and all(request.is_streamed for request in requests)
        answered = self._live.answered.get((project, name))
        return Activity(
            jobs=tuple(job for entry, job in self._jobs.activity() if entry.model_key == model.key),
            num_requests=len(requests),
            num_sampling=sum(bool(request.completion.token_ids) for request in requests) if is_told else None,
            answered_s=None if answered is None else time.monotonic() - answered,
            engine="starting" if host is None else host.engine.state,
            engine_sleeps=host is not None and host.placement.sleeps and host.engine.closed.lasts,
            trainer="starting" if host is None else _state(host.trainer_process),
        )

    async def system(self, project: str | None) -> SystemAnswer:
        """Describe the server: everything, or what belongs to `project`."""
        whole = project is None
        hosts = self._hosts.all() if whole else []
        stats = await asyncio.gather(*map(engine_stats, hosts))
        processes, disk = [], None
        if whole:
            usage = shutil.disk_usage(self._models.data_dir.root)
            disk = DiskPart(free_bytes=usage.free, total_bytes=usage.total)
            rss = rss_bytes(os.getpid(), with_children=False)
            processes = [ProcessPart(name="art-server", kind="server", pid=os.getpid(), state="up", rss_bytes=rss)]
        for host in hosts:
            processes += [
                _process_part(
                    one.process, "engine", num_requests=one.num_requests, policies=one.policies, refused=one.refused
                )
                for one in host.engine.replicas
            ]
            processes.append(_process_part(host.trainer_process, "trainer"))
        return SystemAnswer(
            at=time.time(),
            started_at=self._started_at,
            is_whole=whole,
            processes=processes,
            engines=[
                EnginePart(
                    name=host.name, base_model=host.base_model, num_running=int(numbers["running"]),
                    num_waiting=int(numbers["waiting"]), num_adapters=int(numbers["adapters"]),
                    kv_cache_share=numbers.get("kv_cache_usage"),
                )
                for host, numbers in zip(hosts, stats, strict=True) if numbers
            ],
            jobs=[
                JobPart(
                    job_id=entry.job_id, kind=entry.kind, project=entry.project, name=entry.name, lane=entry.lane,
                    runs=job.runs, queue_place=job.queue_place, age_s=job.age_s, progress=job.progress,
                )
                for entry, job in self._jobs.activity() if project in (None, entry.project)
            ],
            tokens=self._tokens(project),
            disk=disk,
            memory_bytes=find_devices().memory_bytes if whole else None,
            num_viewers=self._live.num_viewers,
            cluster=ClusterPart(**self._cluster.status()) if whole and self._cluster is not None else None,
            history=self._follower.history() if whole else SystemHistory(),
        )  # fmt: skip

    def _tokens(self, project: str | None) -> list[ModelTokens]:
        counts, trained = dict(self._gateway.tokens), self._jobs.trained
        keys = sorted({key for key, _ in counts} | trained.keys())
        totals = {f"sampled {key}": float(counts.get((key, "completion"), 0)) for key in keys}
        totals |= {f"trained {key}": float(trained[key]) for key in keys}
        rates = self._token_rates.add(totals)
        return [
            ModelTokens(
                project=key.partition("/")[0], name=key.partition("/")[2], trained=trained[key],
                prompt=counts.get((key, "prompt"), 0), cached=counts.get((key, "cached"), 0),
                sampled=counts.get((key, "completion"), 0), sampled_per_s=rates.get(f"sampled {key}"),
                trained_per_s=rates.get(f"trained {key}"),
            )
            for key in keys if project in (None, key.partition("/")[0])
        ]  # fmt: skip


def _process_part(process: ChildProcess, kind: Literal["engine", "trainer"], **more: Any) -> ProcessPart:
    status = process.status
    return ProcessPart(
        name=process.spec.name, kind=kind, pid=status["pid"],
        state=_state(process) if process.is_begun else "not started",
        doing=status.get("doing"), doing_s=status.get("since_s"), rss_bytes=status.get("rss_bytes"),
        place=process.spec.place or None, num_restarts=status["restarts"], last_end=status["last_end"], **more,
    )  # fmt: skip


def _state(process: ChildProcess) -> ProcessState:
    state: ProcessState = process.status["state"]
    return state


# -- for `/metrics` and `/ready` --

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
    hosts, names = list(hosts), _GAUGES | _COUNTERS
    by_host = zip(hosts, await asyncio.gather(*map(engine_stats, hosts)), strict=True)
    numbers = [(host.name, key, value) for host, stats in by_host for key, value in stats.items() if key in names]
    return [Measurement(names[key], value, {"engine": name}) for name, key, value in numbers]


def measure_processes(hosts: Iterable[BaseModelHost]) -> Iterator[Measurement]:
    for host in hosts:
        for process in host.processes:
            status, labels = process.status, {"process": process.spec.name}
            yield Measurement("art_process_up", float(status["state"] == "up"), labels)
            yield Measurement("art_process_restarts_total", float(status["restarts"]), labels)
            if "rss_bytes" in status:
                yield Measurement("art_process_resident_bytes", float(status["rss_bytes"]), labels)
        for replica in host.engine.replicas:
            labels = {"process": replica.process.spec.name}
            yield Measurement("art_engine_process_requests", float(replica.num_requests), labels)
            yield Measurement("art_engine_process_policies", float(len(replica.policies)), labels)
            yield Measurement("art_engine_process_refused", float(len(replica.refused)), labels)


def measure_cluster(cluster: Cluster) -> Iterator[Measurement]:
    part = ClusterPart(**cluster.status())
    for state, alive in (("alive", True), ("gone", False)):
        yield Measurement("art_cluster_nodes", float(sum(node.alive is alive for node in part.nodes)), {"state": state})
    for kind, state in itertools.product(("engine", "trainer"), ("waiting", "working")):
        count = sum((worker.kind, worker.state) == (kind, state) for worker in part.workers)
        yield Measurement("art_cluster_workers", float(count), {"kind": kind, "state": state})
    yield Measurement("art_cluster_lost_total", float(part.num_lost))
    if part.store_used_bytes is not None:
        yield Measurement("art_cluster_store_used_bytes", float(part.store_used_bytes))


MIN_FREE_BYTES = 2**30
"""Free space for the data directory below which `/ready` reports that the server is not ready."""
WRITE_TIMEOUT_S = 5.0
"""Longest time for a test write to the database. It takes longer only when the disk hangs."""


async def find_obstacles(hosts: Iterable[BaseModelHost], recorder: Recorder, root: Path) -> dict[str, str]:
    """Describe what keeps the server from working, by the name of the check; empty if nothing does. `hosts` are those
    of the base models that it must always serve."""
    obstacles: dict[str, str] = {}
    for host in hosts:
        trainer = host.trainer_process
        for name, state in ((host.engine.name, host.engine.state), (trainer.spec.name, _state(trainer))):
            if state != "up":
                obstacles[name] = state
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
