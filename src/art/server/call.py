"""What a route handler gets, and what the server needs of the runtime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel

from art.protocol.chat import ChatRequest
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import JobStatus, ModelStatus, RegisterRequest, TrainRequest, TrainSFTRequest
from art.server.asgi import Receive, Scope, Send, read_json

W = TypeVar("W", bound=BaseModel)


class RolloutsApi(Protocol):
    async def get(self, rollout_id: str, project: str | None) -> RolloutRecord: ...

    async def put(self, rollout_id: str, update: RolloutUpdate, project: str | None) -> RolloutStatus: ...

    async def page(self, query: RolloutQuery) -> RolloutPage: ...


class GatewayApi(Protocol):
    async def complete(self, request: ChatRequest, *, rollout_id: str | None = None) -> dict[str, Any]: ...

    async def stream(
        self, request: ChatRequest, *, rollout_id: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]: ...

    @property
    def rollouts(self) -> RolloutsApi: ...


class RuntimeApi(Protocol):
    """Every method may raise an `ArtError`, which becomes its HTTP status."""

    @property
    def gateway(self) -> GatewayApi: ...

    async def health(self) -> dict[str, Any]: ...

    async def list_models(self) -> list[ModelStatus]: ...

    async def register(self, request: RegisterRequest) -> ModelStatus: ...

    async def model_status(self, project: str, name: str) -> ModelStatus: ...

    async def list_checkpoints(self, project: str, name: str) -> list[int]:
        """Steps, in order."""
        ...

    async def delete_checkpoints(self, project: str, name: str, keep_steps: Iterable[int]) -> list[int]:
        """The steps that are gone."""
        ...

    async def preflight(self, project: str, name: str, request: PreflightRequest) -> PreflightReport:
        """What training the model needs, looked at; nothing is trained."""
        ...

    async def submit_train(self, project: str, name: str, request: TrainRequest) -> JobStatus: ...

    async def submit_train_sft(self, project: str, name: str, request: TrainSFTRequest) -> JobStatus: ...

    async def job_status(self, job_id: str, wait_s: float) -> JobStatus:
        """Waits at most `wait_s` for the job to end."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request under way."""

    runtime: RuntimeApi
    scope: Scope
    receive: Receive
    send: Send
    max_body_bytes: int
    path: dict[str, str]
    """Parameters in the path."""
    trusted: bool
    """The request came with the server's key; always so where the route asks for it."""

    async def json(self) -> Any:
        return await read_json(self.scope, self.receive, self.max_body_bytes)

    async def body(self, kind: type[W]) -> W:
        """The body as a wire type. A `ValidationError` becomes status 400."""
        return kind.model_validate(await self.json())

    def query(self, name: str) -> str | None:
        """A parameter of the query string; the last one counts."""
        values = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return values[-1] if values else None


Handler = Callable[[Call], Awaitable[Any]]
"""Returns what to answer as JSON (a wire type, a dict), or `None` if it has answered itself."""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    """With `{name}` for a parameter, which matches one path component."""
    handler: Handler
    status: int = 200
    open: bool = False
    """Needs no key."""
