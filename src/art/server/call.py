"""What a route handler gets, and what the server needs of the runtime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel

from art.errors import NotFoundError
from art.gateway.chat import ChatStream
from art.protocol.chat import ChatRequest, Message
from art.protocol.checkpoint_calls import (
    CheckpointInfo,
    ExportRequest,
    FileInfo,
    FileList,
    ForkRequest,
    MetricsRow,
    PullRequest,
    PushRequest,
)
from art.protocol.jobs import JobEvent
from art.protocol.keys import KeyScope
from art.protocol.measurements import Measurement
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    DeleteCheckpointsRequest,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.asgi import Receive, Scope, Send, read_json
from art.server.auth import Caller
from art.server.errors import ErrorBody
from art.server.state import ServerState

W = TypeVar("W", bound=BaseModel)

INFERENCE_BASES = tuple(
    f"{project}{rollout}/v1" for project in ("", "/projects/{project}") for rollout in ("", "/rollouts/{rollout_id}")
)
"""Base URLs under which a model can be asked. The project in one decides what a name without a project means."""


class RolloutsApi(Protocol):
    def announced_model(self, rollout_id: str, project: str | None) -> str | None:
        """The model of a rollout, of one project or of all."""
        ...

    async def get(self, rollout_id: str, project: str | None) -> RolloutRecord: ...

    async def put(self, rollout_id: str, update: RolloutUpdate, project: str | None) -> RolloutStatus: ...

    async def page(self, query: RolloutQuery) -> RolloutPage: ...


class GatewayApi(Protocol):
    async def complete(self, request: ChatRequest, *, rollout_id: str | None = None) -> dict[str, Any]: ...

    async def stream(
        self, request: ChatRequest, *, rollout_id: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]: ...

    async def open_stream(self, request: ChatRequest, *, rollout_id: str | None = None) -> ChatStream: ...

    async def count_tokens(self, request: ChatRequest, *, rollout_id: str | None = None) -> int: ...

    def recorded_messages(self, exchange_id: str, *, project: str | None) -> list[Message]:
        """The conversation that ended with an exchange, of one project or of any."""
        ...

    @property
    def rollouts(self) -> RolloutsApi: ...


class CheckpointsApi(Protocol):
    """Of the model that the first two arguments, project and name, say."""

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]: ...

    async def delete(self, project: str, name: str, request: DeleteCheckpointsRequest) -> list[int]:
        """The steps that are gone."""
        ...

    async def files(self, project: str, name: str, step: int, form: str | None) -> FileList: ...

    async def file(self, project: str, name: str, step: int, file: str, form: str | None) -> tuple[Path, FileInfo]:
        """Where a file of that list lies."""
        ...

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None: ...

    async def fork(self, project: str, name: str, request: ForkRequest) -> JobStatus: ...

    async def export(self, project: str, name: str, request: ExportRequest) -> JobStatus: ...

    async def push(self, project: str, name: str, request: PushRequest) -> JobStatus: ...

    async def pull(self, project: str, name: str, request: PullRequest) -> JobStatus: ...


class RuntimeApi(Protocol):
    """Every method may raise an `ArtError`, which becomes its HTTP status."""

    @property
    def checkpoints(self) -> CheckpointsApi: ...

    @property
    def gateway(self) -> GatewayApi: ...

    async def health(self) -> dict[str, Any]: ...

    async def obstacles(self) -> dict[str, str]:
        """What keeps the server from working, by what was looked at."""
        ...

    async def measurements(self) -> list[Measurement]: ...

    async def list_models(self) -> list[ModelStatus]: ...

    async def register(self, request: RegisterRequest) -> ModelStatus: ...

    async def model_status(self, project: str, name: str) -> ModelStatus: ...

    def name_in(self, project: str, model: str) -> str | None:
        """The whole name of what a project calls `model`; `None` if it has no such model."""
        ...

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """What training the model needs, looked at; nothing is trained."""
        ...

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus: ...

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus: ...

    async def job_status(self, job_id: str, wait_s: float) -> JobStatus:
        """Waits at most `wait_s` for the job to end."""
        ...

    async def list_jobs(
        self, *, project: str | None, name: str | None, unfinished: bool, limit: int
    ) -> list[JobStatus]:
        """Newest first."""
        ...

    async def cancel_job(self, job_id: str) -> JobStatus: ...

    def job_events(self, job_id: str, after: int) -> AsyncGenerator[JobEvent | None, None]:
        """What happens to a job behind event number `after`, until it has ended; `None` is a sign of life."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request under way."""

    runtime: RuntimeApi
    scope: Scope
    receive: Receive
    send: Send
    server: ServerState
    path: dict[str, str]
    """Parameters in the path; each is a valid name, and a `project` or `job_id` is one that the caller may use."""
    caller: Caller
    """Who asks. What else a handler is told of another project's things, in the body or behind an id, is its own to
    check: see `own_model` and `Caller.check_project`."""

    async def json(self) -> Any:
        return await read_json(self.scope, self.receive, self.server.config)

    async def body(self, kind: type[W]) -> W:
        """The body as a wire type. A `ValidationError` becomes status 400."""
        return kind.model_validate(await self.json())

    def query(self, name: str) -> str | None:
        """A parameter of the query string; the last one counts."""
        values = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return values[-1] if values else None

    async def own_model(self, name: str) -> str:
        """The whole name of a model as this caller means it.

        A key of one project knows only the models of that project. The project in the URL is where a key for all
        projects looks first.

        Raises:
            NotFoundError: a model that is not there, or not for this key.
        """
        own = self.caller.project or self.path.get("project")
        if own is None:
            return name
        found = self.runtime.name_in(own, name) or self._announced_model(name)
        if found is None and self.caller.project is not None:
            raise NotFoundError(f"there is no model {name!r} for a key of project {own!r}", param="model")
        return found or name

    def _announced_model(self, name: str) -> str | None:
        """The model of the rollout in the URL, for agents that cannot be told another model's name."""
        rollout_id = self.path.get("rollout_id")
        if rollout_id is None or "@" in name:
            return None
        return self.runtime.gateway.rollouts.announced_model(rollout_id, self.caller.project)


Handler = Callable[[Call], Awaitable[Any]]
"""Returns what to answer as JSON (a wire type, a dict), or `None` if it has answered itself."""


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint. The first line of its handler's docstring is its summary in the OpenAPI document."""

    method: str
    path: str
    """With `{name}` for a parameter, which matches one path component."""
    handler: Handler
    scope: KeyScope | None
    """That the key must have; `None`: no key is asked for."""
    request: type[BaseModel] | None = None
    """Wire type of the body; `None`: it is not read."""
    response: type[BaseModel] | None = None
    """Wire type of the answer; `None`: it is no JSON."""
    status: int = 200
    media: tuple[str, ...] = ("application/json",)
    """Kinds of answer; `text/event-stream` is one of them where the answer can come as server-sent events."""
    samples: bool = False
    """It asks an engine for tokens, and counts against the project's limit of chats."""
    query: Mapping[str, type] = field(default_factory=dict)
    """Parameters of the query string."""
    error_body: ErrorBody | None = None
    """Makes the body of an error; `None`: in OpenAI's shape."""
