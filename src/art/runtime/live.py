"""What the whole server does now, for people who watch: one model (`activity`), the system view (`system`), the log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import art
from art.gateway.chat import Gateway
from art.gateway.live import LiveHub
from art.protocol.live.activity import Activity, ProcessState
from art.protocol.live.events import LogLine
from art.protocol.live.system import DevicePart, DiskPart, EnginePart, JobPart, ModelTokens, ProcessPart, SystemAnswer
from art.runtime.children.child import rss_bytes
from art.runtime.host import BaseModelHost, Hosts
from art.runtime.jobs.runner import JobRunner
from art.runtime.measurements import engine_stats
from art.runtime.models import Models
from art.runtime.placement.placement import find_devices
from art.runtime.supervision.process import ChildProcess
from art.runtime.supervision.report import MAX_WAITS, describe_waits
from art.runtime.supervision.waits import current_waits

WINDOW_S = 60.0
"""Rates are means over at most this time."""


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


_QUERY = ("nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 5.0
COUNT_AGAIN_S = 60.0
"""Time between two counts of the size of the data directory."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and all its descendants, from Linux's /proc; `None` where that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    children: list[str] = []
    with contextlib.suppress(OSError):  # some kernels do not have this file
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(cpu_seconds(int(child)) or 0.0 for child in children)


def gpu_memory() -> list[DevicePart]:
    """List the GPUs with their memory, as `nvidia-smi` has them; none where it does not answer. Blocks."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpu_memory(done.stdout) if done.returncode == 0 else []


def parse_gpu_memory(listing: str) -> list[DevicePart]:
    """Parse lines such as "NVIDIA H200, 1024, 143771", in MiB. A GPU that does not tell its memory is left out."""
    parts = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            used, total = (int(field) * 2**20 for field in fields[1:])
            parts.append(DevicePart(name=fields[0], used_bytes=used, total_bytes=total))
    return parts


class DirectorySize:
    """Counts the bytes of a directory in a thread of its own, since it may hold a million files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: int | None = None
        self._counted_at = float("-inf")
        self._thread: threading.Thread | None = None

    def disk(self) -> DiskPart:
        """The size as it was last counted, and the free space. Begins to count again when it is time."""
        is_due = time.monotonic() - self._counted_at > COUNT_AGAIN_S
        if is_due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._count, name="size of the data directory", daemon=True)
            self._thread.start()
        usage = shutil.disk_usage(self._root)
        return DiskPart(data_bytes=self._bytes, free_bytes=usage.free, total_bytes=usage.total)

    def _count(self) -> None:
        total, folders = 0, [self._root]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:  # files may go meanwhile
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        with contextlib.suppress(OSError):
                            total += entry.stat(follow_symlinks=False).st_size
        self._bytes, self._counted_at = total, time.monotonic()


MAX_LINES_PER_S = 20
"""More lines of one second are counted and left out."""
MAX_CHARS = 2000
LIVE_LOGGER = "art"


class LiveLog(logging.Handler):
    """Sends the log of this process to a hub while somebody watches. Any thread may log."""

    def __init__(self, hub: LiveHub, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.INFO)
        self._hub = hub
        self._loop = loop
        self._second = 0
        self._num_sent = self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._hub.num_viewers or self._loop.is_closed():
            return
        if self._second != int(record.created):
            self._second, self._num_sent = int(record.created), 0
        if self._num_sent >= MAX_LINES_PER_S:
            self._num_left_out += 1
            return
        self._num_sent += 1
        line = LogLine(
            level=record.levelname, logger=record.name, text=record.getMessage()[:MAX_CHARS],
            num_left_out=self._num_left_out,
        )  # fmt: skip
        self._num_left_out = 0
        self._loop.call_soon_threadsafe(self._hub.publish, None, line)


_PACKAGES = ("torch", "transformers", "peft", "vllm", "tokenizers", "llguidance", "pydantic", "openai")


class Overview:
    """Looks at the parts of one server. Any thread may call `activity`; `system` belongs to the event loop."""

    def __init__(self, models: Models, hosts: Hosts, jobs: JobRunner, gateway: Gateway) -> None:
        self._models = models
        self._hosts = hosts
        self._jobs = jobs
        self._gateway = gateway
        self._live = gateway.live
        self._started_at = time.time()
        self._token_rates, self._cpu_rates = Rates(), Rates()
        self._size = DirectorySize(models.data_dir.root)

    def activity(self, project: str, name: str) -> Activity | None:
        """What happens for a model; `None` if the server does not have it."""
        model = self._models.by_key.get(f"{project}/{name}")
        if model is None:
            return None
        host = self._hosts.existing(model)
        requests = [one for one in list(self._live.running.values()) if (one.project, one.name) == (project, name)]
        is_told = bool(requests) and all(request.is_streamed for request in requests)
        answered = self._live.answered.get((project, name))
        trainer = {} if host is None else host.trainer_process.status
        return Activity(
            jobs=tuple(job for entry, job in self._jobs.activity() if entry.model_key == model.key),
            num_requests=len(requests),
            num_sampling=sum(bool(request.token_ids) for request in requests) if is_told else None,
            answered_s=None if answered is None else time.monotonic() - answered,
            engine="starting" if host is None else _state(host.engine_process),
            engine_sleeps=host is not None and host.placement.sleeps and host.engine.closed.lasts,
            trainer="starting" if host is None else _state(host.trainer_process),
            trainer_does=trainer.get("doing"),
        )

    async def system(self, project: str | None) -> SystemAnswer:
        """Describe the server.

        Args:
            project: leave out what does not belong to this project; `None` for everything.
        """
        whole = project is None
        hosts = self._hosts.all() if whole else []
        engines = await asyncio.gather(*(_engine_part(host) for host in hosts))
        has_gpus = whole and bool(find_devices().gpus)
        return SystemAnswer(
            at=time.time(),
            started_at=self._started_at,
            is_whole=whole,
            processes=self._processes(hosts) if whole else [],
            devices=await asyncio.to_thread(gpu_memory) if has_gpus else [],
            engines=[part for part in engines if part is not None],
            jobs=self._job_parts(project),
            tokens=self._tokens(project),
            disk=await asyncio.to_thread(self._size.disk) if whole else None,
            memory_bytes=find_devices().memory_bytes if whole else None,
            waits=self._waits(hosts) if whole else [],
            versions=await asyncio.to_thread(_versions) if whole else {},
            num_viewers=self._live.num_viewers,
        )

    def _processes(self, hosts: list[BaseModelHost]) -> list[ProcessPart]:
        rss = rss_bytes(os.getpid(), with_children=False)
        parts = [ProcessPart(name="art-server", kind="server", pid=os.getpid(), state="up", rss_bytes=rss)]
        for host in hosts:
            parts += [_process_part(host.engine_process, "engine"), _process_part(host.trainer_process, "trainer")]
        children = {part.pid for part in parts[1:] if part.pid is not None}
        seconds = {str(pid): used for pid in children if (used := cpu_seconds(pid)) is not None}
        if (own := cpu_seconds(os.getpid())) is not None:  # the children are shown by themselves
            seconds[str(os.getpid())] = max(0.0, own - sum(seconds.values()))
        rates = self._cpu_rates.add(seconds)
        return [part.model_copy(update={"cpu_share": rates.get(str(part.pid))}) for part in parts]

    def _job_parts(self, project: str | None) -> list[JobPart]:
        return [
            JobPart(
                job_id=entry.job_id, kind=entry.kind, project=entry.project, name=entry.name, lane=entry.lane,
                runs=job.runs, queue_place=job.queue_place, age_s=job.age_s, progress=job.progress,
            )
            for entry, job in self._jobs.activity()
            if project in (None, entry.project)
        ]  # fmt: skip

    def _tokens(self, project: str | None) -> list[ModelTokens]:
        counts = dict(self._gateway.tokens)
        keys = sorted({key for key, _ in counts} | self._jobs.trained.keys())
        totals = {f"sampled {key}": float(counts.get((key, "completion"), 0)) for key in keys}
        totals |= {f"trained {key}": float(self._jobs.trained[key]) for key in keys}
        rates = self._token_rates.add(totals)
        parts = []
        for key in keys:
            of, _, name = key.partition("/")
            if project in (None, of):
                prompt, cached, sampled = (counts.get((key, kind), 0) for kind in ("prompt", "cached", "completion"))
                parts.append(
                    ModelTokens(
                        project=of, name=name, prompt=prompt, cached=cached, sampled=sampled,
                        trained=self._jobs.trained[key], sampled_per_s=rates.get(f"sampled {key}"),
                        trained_per_s=rates.get(f"trained {key}"),
                    )
                )  # fmt: skip
        return parts

    @staticmethod
    def _waits(hosts: list[BaseModelHost]) -> list[str]:
        waits = [str(wait) for wait in current_waits()]
        for host in hosts:
            waits += [*describe_waits(host.engine_process), *describe_waits(host.trainer_process)]
        return waits[:MAX_WAITS]


async def _engine_part(host: BaseModelHost) -> EnginePart | None:
    if not (stats := await engine_stats(host)):
        return None
    return EnginePart(
        name=host.name, base_model=host.base_model, num_running=int(stats["running"]),
        num_waiting=int(stats["waiting"]), num_adapters=int(stats["adapters"]),
        kv_cache_share=stats.get("kv_cache_usage"),
    )  # fmt: skip


def _process_part(process: ChildProcess, kind: Literal["engine", "trainer"]) -> ProcessPart:
    status = process.status
    return ProcessPart(
        name=process.spec.name, kind=kind, pid=status["pid"],
        state=_state(process) if process.is_begun else "not started",
        doing=status.get("doing"), doing_s=status.get("since_s"), rss_bytes=status.get("rss_bytes"),
        place=process.spec.place or None, num_restarts=status["restarts"], last_end=status["last_end"],
    )  # fmt: skip


def _state(process: ChildProcess) -> ProcessState:
    state: ProcessState = process.status["state"]
    return state


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"art": art.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
