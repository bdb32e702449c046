"""What people who watch a server get: the events of the live view, what happens for one model, and the system view.

    reset  request_started ...  tokens  tokens  request_ended  job_progress  step  finding

A stream of events begins with `reset`, then `request_started` for each request that runs, and `request_ended` for the
newest that have ended. Requests are named by the id of their exchange, which is also the id in the record. `name` is
the name of a model; times are seconds since the epoch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.protocol.training import JobKind, JobProgress, JobState


class Data(BaseModel):
    """Base class of what an event says, and of the parts of the system view."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Reset(Data):
    """Forget all requests: those that run now follow. It comes first, and after events were lost."""

    kind: Literal["reset"] = "reset"


class LiveRequestData(Data):
    """What the events of a request share. Each choice of a request with `n` above 1 is a request of its own."""

    id: str
    project: str
    name: str
    policy_version: int
    rollout_id: str | None
    scenario: str | None
    """Name of the rollout's scenario where the client said it, else the beginning of the first question."""
    turn: int
    """Number of the answer in its conversation, from 1."""
    num_prompt_tokens: int
    started_at: float


class RequestStarted(LiveRequestData):
    """A request waits for the engine or is being computed."""

    kind: Literal["request_started"] = "request_started"
    last_role: str | None
    last_text: str
    """Beginning of the last message of the prompt, at most `LAST_TEXT_CHARS` characters."""
    max_tokens: int
    text: str = ""
    """What was sampled before the viewer came; only the end of a long text."""
    num_tokens: int = 0
    """Tokens that were sampled before the viewer came."""
    is_text_known: bool = True
    """False for a request that began when nobody was watching: its text comes as a whole when it ends."""


class Piece(Data):
    """Tokens of one request."""

    id: str
    text: str
    """The tokens' text as it was sampled, with reasoning, tool calls and special tokens. Characters of several tokens
    come with the last of them."""
    num_tokens: int


class Tokens(Data):
    """What the requests of a project have sampled since the last such event."""

    kind: Literal["tokens"] = "tokens"
    pieces: list[Piece]


class RequestEnded(LiveRequestData):
    """A request has its answer, failed, or was cancelled by its client."""

    kind: Literal["request_ended"] = "request_ended"
    outcome: Literal["stop", "length", "tool_calls", "cancelled", "failed"]
    error: str | None = None
    num_cached_tokens: int
    """Prompt tokens that the engine had in its cache."""
    num_tokens: int
    total_s: float
    """From the request's arrival at the engine's queue to its end."""
    queue_s: float | None
    """Wait for a place at the engine. This and the next two are null where the engine does not tell them."""
    prefill_s: float | None
    """Computation of the prompt, up to the first sampled token."""
    decode_s: float | None
    """From the first sampled token to the last."""


class JobMoved(Data):
    """A job began, made progress or ended."""

    kind: Literal["job_progress"] = "job_progress"
    job_id: str
    job_kind: JobKind
    project: str
    name: str
    state: JobState
    phase: str | None = None
    """What a running job does, e.g. "train" or "publish"."""
    done: int | None = None
    total: int | None = None
    """Amount of work in the unit of `done`: micro-batches of a training, bytes of a file."""
    error: str | None = None


class StepEnded(Data):
    """A training step has ended."""

    kind: Literal["step"] = "step"
    project: str
    name: str
    step: int
    trained: bool
    """Whether the step made a checkpoint."""
    metrics: dict[str, float]
    """The few metrics that the live view shows."""


class FindingMade(Data):
    """Something that a person should know about a step."""

    kind: Literal["finding"] = "finding"
    project: str
    name: str
    step: int | None
    text: str


LAST_TEXT_CHARS = 600
_Event = Reset | RequestStarted | Tokens | RequestEnded | JobMoved | StepEnded | FindingMade
LiveData = Annotated[_Event, Field(discriminator="kind")]


class LiveEvent(Data):
    """One server-sent event: `number` is its id and `data.kind` its name."""

    number: int
    """Viewers that reconnect name the last number that they have got. It grows, also over restarts of the server."""
    at: float
    data: LiveData

    @functools.cached_property
    def body(self) -> bytes:
        """`data` as JSON, which is made once for all viewers."""
        return self.data.model_dump_json().encode()


# -- what happens for one model --

ProcessState = Literal["up", "starting", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobActivity:
    """A job that has not ended."""

    kind: JobKind
    runs: bool
    """False while it waits in its queue."""
    age_s: float
    """Time since it began to run; while it waits, since it came or this server began."""
    progress: JobProgress | None = None
    queue_place: int | None = None
    """Place in its queue; 1 is the next to run."""
    runs_before: str | None = None
    """`project/name` of the model whose job runs now in the same queue, unless it belongs to another project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What happens for a model: its unfinished jobs, its requests, and the processes of its base model."""

    jobs: tuple[JobActivity, ...]
    """Oldest first."""
    num_requests: int
    """Requests of the model that have no answer yet."""
    num_sampling: int | None
    """How many of them have sampled a token; `None` where the engine does not report single tokens now."""
    answered_s: float | None
    """Time since the model's last answer; `None` if it has given none since the server began."""
    engine: ProcessState
    engine_sleeps: bool
    """Whether the engine has put its requests aside, because the trainer needs its device."""
    trainer: ProcessState


# -- the system view --


class ProcessPart(Data):
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
    num_restarts: int = 0
    place: str | None = None
    """The devices of an engine or trainer, and why it has them."""
    last_end: str | None = None
    """How the last of its processes ended."""
    num_requests: int | None = None
    """Requests that an engine computes."""
    policies: list[str] = []
    """Adapters that an engine has proved to serve."""
    refused: dict[str, str] = {}
    """Adapters that an engine does not serve though another replica does, and why."""


class EnginePart(Data):
    """An engine and its requests."""

    name: str
    base_model: str
    num_running: int
    num_waiting: int
    num_adapters: int
    kv_cache_share: float | None
    """Used share of the memory for keys and values, where the engine tells it."""


class JobPart(Data):
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


class ModelTokens(Data):
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


class DiskPart(Data):
    """The disk of the data directory."""

    free_bytes: int
    total_bytes: int


class NodePart(Data):
    """A machine of a cluster."""

    machine: str
    address: str
    alive: bool
    resources: dict[str, float]
    """What it has altogether, such as {"CPU": 8.0, "GPU": 1.0}."""


class WorkerPart(Data):
    """A worker that has come to the server's door."""

    kind: Literal["engine", "trainer"]
    machine: str
    pid: int
    state: Literal["waiting", "working"]
    since: float


class ActorPart(Data):
    """An engine or a trainer that a cluster has placed."""

    name: str
    machines: list[str]
    """One for each rank of a trainer; empty while it is being placed."""
    starts: int
    problem: str | None = None
    """Why it has no place yet."""


class ClusterPart(Data):
    """Where engines and trainers run, if not on the server's machine."""

    kind: str
    nodes: list[NodePart] = []
    free: dict[str, float] = {}
    """What is free on all nodes together."""
    store_bytes: int | None = None
    store_used_bytes: int | None = None
    """The object store of all nodes together."""
    workers: list[WorkerPart] = []
    actors: list[ActorPart] = []
    num_lost: int = 0
    """Workers whose connection ended."""


class SystemHistory(Data):
    """The last hour of a server, a point every 20 seconds, oldest first. All lists are equally long."""

    at: list[float] = []
    sampled_per_s: list[float] = []
    """Tokens that were sampled since the point before, per second."""
    trained_per_s: list[float] = []
    num_requests: list[int] = []
    """Requests that waited or were computed at that moment."""
    rss_bytes: list[int] = []
    """Memory of all processes on the server's machine."""


class SystemAnswer(Data):
    """How the server is. A key for one project gets the jobs and tokens of this project, and no more."""

    at: float
    started_at: float
    is_whole: bool
    """False for a key of one project."""
    processes: list[ProcessPart]
    engines: list[EnginePart]
    jobs: list[JobPart]
    tokens: list[ModelTokens]
    disk: DiskPart | None
    memory_bytes: int | None
    """Main memory that the server may use."""
    num_viewers: int
    """Viewers of live events."""
    cluster: ClusterPart | None = None
    """Null if everything runs on the server's machine."""
    history: SystemHistory = SystemHistory()
    """Empty for a key of one project."""
