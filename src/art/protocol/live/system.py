"""What the system view shows: processes, memory, queues, throughput and versions of a running server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from art.protocol.job_states import JobKind
from art.protocol.training import JobProgress


class Part(BaseModel):
    """Base class of the parts of the answer."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class ProcessPart(Part):
    """The server, or one of its engines and trainers."""

    name: str
    kind: Literal["server", "engine", "trainer"]
    pid: int | None
    state: Literal["up", "starting", "failed", "not started"]
    doing: str | None = None
    """What it last said that it does."""
    doing_s: float | None = None
    """For how long."""
    rss_bytes: int | None = None
    """Resident memory, with the processes that it has started."""
    cpu_share: float | None = None
    """Cores that it used since the last answer, with the processes that it has started: 1.5 is one and a half."""
    num_restarts: int = 0
    place: str | None = None
    """The devices of an engine or trainer, and why it has them."""
    last_end: str | None = None
    """How the last of its processes ended."""


class DevicePart(Part):
    """A GPU."""

    name: str
    used_bytes: int
    total_bytes: int


class EnginePart(Part):
    """An engine and its requests."""

    name: str
    base_model: str
    num_running: int
    num_waiting: int
    num_adapters: int
    kv_cache_share: float | None
    """Used share of the memory for keys and values, where the engine tells it."""


class JobPart(Part):
    """A job that has not ended."""

    job_id: str
    kind: JobKind
    project: str
    name: str
    lane: str
    """Name of its queue. Jobs of one queue run one after the other."""
    runs: bool
    queue_place: int | None
    age_s: float
    progress: JobProgress | None


class ModelTokens(Part):
    """Tokens of a model since the server began."""

    project: str
    name: str
    prompt: int
    cached: int
    """The part of `prompt` that was in the engine's cache."""
    sampled: int
    trained: int
    sampled_per_s: float | None
    """Over the last minute at most; null in the first answer."""
    trained_per_s: float | None


class DiskPart(Part):
    """The disk of the data directory."""

    data_bytes: int | None
    """Size of the data directory; null until it has been counted, which takes a while after the first question."""
    free_bytes: int
    total_bytes: int


class SystemAnswer(Part):
    """How the server is. A key for one project gets the jobs and tokens of this project, and no more."""

    at: float
    started_at: float
    is_whole: bool
    """False for a key of one project."""
    processes: list[ProcessPart]
    devices: list[DevicePart]
    engines: list[EnginePart]
    jobs: list[JobPart]
    tokens: list[ModelTokens]
    disk: DiskPart | None
    memory_bytes: int | None
    """Main memory that the server may use."""
    waits: list[str]
    """Who waits for whom in the server, one sentence each."""
    versions: dict[str, str]
    num_viewers: int
    """Viewers of live events."""
