"""A request with everything that its handler needs (`Call`), and the declaration of an endpoint (`Route`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from art.errors import InvalidRequestError, NotFoundError
from art.protocol.chat import short
from art.protocol.dialects.chat_completions import ChatRequest
from art.protocol.keys import KeyScope
from art.protocol.training import validate_training
from art.server.auth import Caller
from art.server.body import BodyLimits, read_json
from art.server.errors import ErrorBody
from art.server.state import ServerState

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime

T = TypeVar("T")
W = TypeVar("W", bound=BaseModel)

INFERENCE_BASES = tuple(
    f"{project}{rollout}/v1" for project in ("", "/projects/{project}") for rollout in ("", "/rollouts/{rollout_id}")
)
"""Base URLs for sampling from models. The project in the URL decides what a model name without a project means."""

SEED_HEADER = "x-art-seed"
"""Header of a request that says where its random numbers begin, if its body has no `seed`. Clients of a pipeline send
it, so that an interrupted rollout samples the same tokens when it starts again."""

IGNORED_HEADER = "x-art-ignored"
"""Header of an answer that names the fields of the request that have no effect: they only advise, or the sampling of
the rollout or model replaces them."""
REMARK_HEADER = "x-art-remark"
"""Header of an answer that tells what else the client should know, such as that the answer cannot be trained."""

MAX_SEED = 2**63 - 1

REST = "model_id"
"""The one parameter of paths that may contain slashes. It comes last in its path."""


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request that is being answered, with all that its handler needs."""

    runtime: Runtime
    request: Request
    server: ServerState
    path: dict[str, str]
    """Parameters in the path. Each is a valid name, and the caller may use the `project` or `job_id` among them."""
    caller: Caller
    """Who sent the request. A handler must itself check projects that the body names, or that an id refers to: see
    `own_model` and `Caller.check_project`."""

    body_limits: BodyLimits
    headers: dict[str, str]
    """Headers of the answer, to which the handler may add."""

    async def parse(self, convert: Callable[[Any], T]) -> T:
        """Return what `convert` makes of the decoded body. It runs in a thread if the body is large."""
        return await read_json(self.request, self.body_limits, self.server.workers, convert)

    async def body(self, kind: type[W]) -> W:
        """Read the body as the wire type `kind`. The server answers a `ValidationError` with status 400."""
        return await self.parse(partial(validate_training, kind))

    async def job_body(self, kind: type[W]) -> W:
        """Read the request for a job. Its id, which makes it run only once, is in the body or in `Idempotency-Key`."""
        key = self.header("idempotency-key")

        def convert(body: Any) -> W:
            if key is not None and isinstance(body, dict) and body.setdefault("job_id", key) != key:
                raise InvalidRequestError(
                    f"the header Idempotency-Key says {key!r} and `job_id` says {short(body['job_id'])}; leave one out",
                    param="job_id",
                )
            return validate_training(kind, body)

        return await self.parse(convert)

    def first_seed(self) -> int | None:
        """Return the number in the header `x-art-seed`; `None` without one.

        Raises:
            InvalidRequestError: it is not an integer from 0 to 2^63 - 1.
        """
        text = self.header(SEED_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_SEED):
            raise InvalidRequestError(
                f"the header {SEED_HEADER} must be an integer from 0 to 2^63 - 1, got {short(text)}", param=SEED_HEADER
            )
        return int(text)

    def without_paths(self, body: bytes) -> bytes:
        """The body as this caller may see it: only keys with scope `admin` see where files lie on the machine."""
        return body if self.caller.may("admin") else self.server.paths.hide(body.decode()).encode()

    def visible(self, error: BaseException) -> BaseException:
        """The error as this caller may see it."""
        return error if self.caller.may("admin") else self.server.paths.hide_in(error)

    def tell(self, requests: Iterable[ChatRequest]) -> None:
        """Tell the client, in headers of the answer, which fields of its requests have no effect, and other remarks."""
        every = list(requests)
        for name, values in (
            (IGNORED_HEADER, [one for request in every for one in request.ignored]),
            (REMARK_HEADER, [one for request in every for one in request.remarks]),
        ):
            if values:
                self.headers[name] = ", ".join(dict.fromkeys(values))

    def header(self, name: str) -> str | None:
        """Return a header of the request."""
        return self.request.headers.get(name)

    def query(self, name: str) -> str | None:
        """Return a parameter of the query string; if it is given several times, the last one."""
        return self.request.query_params.get(name) or None

    def own_model(self, name: str) -> str:
        """Return the full name, `project/name`, of the model that this caller means by `name`.

        A key for one project knows only the models of that project. A key for all projects looks in the project of the
        URL first.

        Raises:
            NotFoundError: there is no such model, or the key is not for its project.
        """
        own = self.caller.project or self.path.get("project")
        if own is None:
            return name
        full_name = self.runtime.resolver.name_in(own, name) or self._announced_model(name)
        if full_name is None and self.caller.project is not None:
            raise NotFoundError(f"there is no model {name!r} for a key of project {own!r}", param="model")
        return full_name or name

    def _announced_model(self, name: str) -> str | None:
        """The model of the rollout in the URL. It answers agents that always ask for some other model's name."""
        rollout_id = self.path.get("rollout_id")
        if rollout_id is None or "@" in name:
            return None
        return self.runtime.gateway.rollouts.announced_model(rollout_id, self.caller.project)


Handler = Callable[[Call], Awaitable[Any]]
"""Function that answers a request. It returns what to send as JSON (wire type or dict), or a whole `Response`."""


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint. The first line of its handler's docstring is its summary in the OpenAPI document."""

    method: str
    path: str
    """The path, in which `{name}` is a parameter that matches one path component."""
    handler: Handler
    scope: KeyScope | None
    """Scope that the key must have; `None` if no key is needed."""
    request: type[BaseModel] | None = None
    """Wire type of the body; `None` if the body is not read."""
    response: type[BaseModel] | None = None
    """Wire type of the answer; `None` if the answer is not JSON."""
    status: int = 200
    media: tuple[str, ...] = ("application/json",)
    """Media types of the answer; `text/event-stream` means that it can come as server-sent events."""
    samples: bool = False
    """Whether the route asks an engine for tokens. It then counts against the project's limit of chat requests."""
    training_data: bool = False
    """Whether the body holds trajectories, for which `max_body_bytes` is the limit. Other bodies are much smaller."""
    query: Mapping[str, type] = field(default_factory=dict)
    """Parameters of the query string, with their types."""
    from_page: bool = False
    """Whether the page may ask for it with the cookie of a session, in place of a key."""
    error_body: ErrorBody | None = None
    """Function that makes the body of an error; `None` for OpenAI's form."""

    @property
    def has_rest(self) -> bool:
        """Whether the path ends with the parameter that may contain slashes."""
        return self.path.endswith(f"{{{REST}}}")
