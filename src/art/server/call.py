"""A request with all that its handler needs (`ApiCall`), the declaration of an endpoint (`Route`), and what another
package may add to a server (`Page`). Routes and wire types make the OpenAPI document:
https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints
from urllib.parse import unquote

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request

import art
from art.errors import InvalidRequestError, NotFoundError
from art.protocol.answers import ErrorAnswer
from art.protocol.chat_completions import ChatRequest
from art.protocol.keys import KeyScope
from art.protocol.training import validate_training
from art.server.answers import ErrorBody
from art.server.auth import Caller
from art.server.body import read_json
from art.server.state import ServerState
from art.storage.layout import NAME_PATTERN

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime


T = TypeVar("T")
W = TypeVar("W", bound=BaseModel)
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

INFERENCE_BASES = tuple(
    f"{project}{rollout}/v1" for project in ("", "/projects/{project}") for rollout in ("", "/rollouts/{rollout_id}")
)
"""Base URLs for sampling from models. The project in the URL decides what a model name without a project means."""

SEED_HEADER = "x-art-seed"
"""Header of a request that says where its random numbers begin, if its body has no `seed`. Clients of a pipeline send
it, so that an interrupted rollout samples the same tokens when it starts again."""

SCENARIO_HEADER = "x-art-scenario"
"""Header of a request that names the scenario of its rollout, percent-encoded. People who watch see it."""
LONGEST_SCENARIO = 600
"""Characters of the header that are read."""
IGNORED_HEADER = "x-art-ignored"
"""Header of an answer that names the fields of the request that have no effect: they only advise, or the sampling of
the rollout or model replaces them."""
REMARK_HEADER = "x-art-remark"
"""Header of an answer that tells what else the client should know, such as that the answer cannot be trained."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ApiCall:
    """An HTTP request that is being answered, with all that its handler needs."""

    runtime: Runtime
    request: Request
    server: ServerState
    path: dict[str, str]
    """Parameters in the path. Each is a valid name, and the caller may use the `project` or `job_id` among them."""
    caller: Caller
    """Who sent the request. A handler must itself check projects that the body names, or that an id refers to: see
    `own_model` and `Caller.check_project`."""
    training_data: bool
    """Whether the body holds trajectories."""
    headers: dict[str, str]
    """Headers of the answer, to which the handler may add."""

    async def parse(self, convert: Callable[[Any], T]) -> T:
        """Return what `convert` makes of the decoded body. It runs in a thread if the body is large."""
        server = self.server
        return await read_json(self.request, server.config, server.workers, convert, training_data=self.training_data)

    async def body(self, kind: type[W]) -> W:
        """Read the body as the wire type `kind`. The server answers a `ValidationError` with status 400."""
        return await self.parse(functools.partial(validate_training, kind))

    def scenario(self) -> str | None:
        """Return the scenario that the header `x-art-scenario` names; `None` without one."""
        return unquote((self.header(SCENARIO_HEADER) or "")[:LONGEST_SCENARIO]) or None

    def first_seed(self) -> int | None:
        """Return the number in the header `x-art-seed`; `None` without one."""
        text = self.header(SEED_HEADER)
        return None if text is None else whole_number(SEED_HEADER, text, most=MAX_SEED)

    def without_paths(self, body: bytes) -> bytes:
        """The body as this caller may see it: only keys with scope `admin` see where files lie on the machine."""
        return body if self.caller.may("admin") else self.server.paths.hide(body.decode()).encode()

    def visible(self, error: BaseException) -> BaseException:
        """The error as this caller may see it."""
        return error if self.caller.may("admin") else self.server.paths.hide_in(error)

    def tell(self, request: ChatRequest) -> None:
        """Tell the client, in headers of the answer, which fields of its request have no effect, and other remarks."""
        for name, values in ((IGNORED_HEADER, request.ignored), (REMARK_HEADER, request.remarks)):
            if values:
                self.headers[name] = ", ".join(dict.fromkeys(values))

    @property
    def model(self) -> tuple[str, str]:
        """Project and name of the model in the path."""
        return self.path["project"], self.path["name"]

    @property
    def step(self) -> int:
        """Step of the checkpoint in the path."""
        return whole_number("step", self.path["step"], most=10**9)

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
        full_name = self.runtime.resolver.name_in(own, name)
        if full_name is None and (rollout_id := self.path.get("rollout_id")) is not None and "@" not in name:
            # The model of the rollout in the URL answers agents that always ask for some other model's name.
            full_name = self.runtime.gateway.rollouts.announced_model(rollout_id, self.caller.project)
        if full_name is None and self.caller.project is not None:
            raise NotFoundError(f"there is no model {name!r} for a key of project {own!r}", param="model")
        return full_name or name


def whole_number(name: str, text: str, *, most: int = 2**53) -> int:
    """Read a parameter or header that is a whole number.

    Raises:
        InvalidRequestError: it is none from 0 to `most`.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most):
        raise InvalidRequestError(f"`{name}` must be a whole number from 0 to {most}, got {text[:40]!r}", param=name)
    return int(text)


Handler = Callable[[ApiCall], Awaitable[Any]]
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
    """Whether a page may ask for it with a session's cookie, in place of a key. Its answers have `PAGE_HEADERS`."""
    error_body: ErrorBody | None = None
    """Function that makes the body of an error; `None` for OpenAI's form."""


class Routes(list[Route]):
    """The routes of a module, in the order of their handlers.

        @ROUTES.add("POST", "/api/models", scope="train")
        async def register(call: ApiCall, request: RegisterRequest) -> ModelStatus:

    The wire types of body and answer are those of the signature, unless `request` or `response` name others.
    """

    def add(self, method: str, *paths: str, scope: KeyScope | None, **declared: Any) -> Callable[[F], F]:
        """Declare a handler as the one of these paths, with the fields of a `Route`."""

        def declare(handler: F) -> F:
            hints = get_type_hints(handler)
            if isinstance(answer := hints["return"], type) and issubclass(answer, BaseModel):
                declared["response"] = answer
            kind = cast("Any", hints.get("request"))

            @functools.wraps(handler)
            async def read_body(call: ApiCall) -> Any:
                return await handler(call, await call.body(kind))

            if kind is not None:
                declared["request"] = kind
            called: Handler = handler if kind is None else read_body
            self.extend(Route(method, path, called, scope, **declared) for path in paths)
            return handler

        return declare


PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of each answer to a route with `from_page`, unless the handler's `Response` has its own of the same name.
https://owasp.org/www-project-secure-headers/"""


class Page:
    """What a package adds to a server for people with a browser.

    A subclass is named by an entry point in the group `art.pages`; each server makes one object of it. Example:

        class Greeting(Page):
            def routes(self) -> list[Route]:
                return [Route("GET", "/hello", self.greet, scope="infer", media=("text/html",), from_page=True)]

            async def greet(self, call: ApiCall) -> Response:
                '''Greet the key that asks.'''
                return Response(f"<h1>Hello, {call.caller.key_id}</h1>", media_type="text/html")
    """

    def __init__(self, server: ServerState, runtime: Runtime | None) -> None:
        """
        Args:
            server: settings, keys and data directory of the server.
            runtime: what the server does; `None` for `art view`, which has files only.
        """
        self.server, self.runtime = server, runtime

    def routes(self) -> list[Route]:
        """Return the routes of the page. The server asks once."""
        return []

    def identify(self, request: Request, route: Route | None) -> Caller | None:
        """Find who sends a request without a key, by a cookie for instance; `None` if this page does not know.

        Args:
            route: a route with `from_page`, of any page or of the server; `None` if nothing has this path.

        Raises:
            AuthenticationError, PermissionDeniedError: the request must not be answered.
        """
        return None

    def greeting(self, url: str) -> str | None:
        """Return the line that `art-server` prints in a terminal when it is ready at an address; `None` for none."""
        return None

    def close(self) -> None:
        """Release what the page holds. The server has ended."""


_REFERENCE = "#/components/schemas/{model}"
_JSON = "application/json"
_OTHER_MEDIA = {"text/event-stream": {"type": "object"}}
"""Schemas of other media types than JSON and plain text: of each server-sent event, with its fields."""


def build_openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """Make the OpenAPI document of a server that has these routes."""
    routes = list(routes)
    kinds = {kind for route in routes for kind in (route.request, route.response) if kind is not None} | {ErrorAnswer}
    ordered = sorted(kinds, key=lambda kind: (kind.__name__, kind.__module__))
    schemas, definitions = models_json_schema([(kind, "validation") for kind in ordered], ref_template=_REFERENCE)
    by_kind = {kind: schemas[kind, "validation"] for kind in ordered}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ART server",
            "version": art.__version__,
            "description": "Serves models with an OpenAI-compatible API, records what they sample, and trains them.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, schemas: dict[type[BaseModel], Any]) -> dict[str, Any]:
    text, tag = inspect.getdoc(route.handler) or "", "operations"
    if "/v1/" in route.path:
        tag = "sampling"
    elif route.path.startswith("/api/"):
        tag = route.path.removeprefix("/api/").partition("/")[0]
    name_schema: dict[str, Any] = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    places = [("path", name, name_schema) for name in re.findall(r"{(\w+)}", route.path)]
    places += [("query", name, TypeAdapter(kind).json_schema()) for name, kind in route.query.items()]
    if route.samples:
        places.append(("header", SEED_HEADER, {"type": "integer", "minimum": 0, "maximum": MAX_SEED}))
        places.append(("header", SCENARIO_HEADER, {"type": "string", "maxLength": LONGEST_SCENARIO}))
    operation: dict[str, Any] = {
        # From method and path, because several paths may share a handler.
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()} {route.path}").strip("_"),
        "summary": text.partition("\n")[0].rstrip("."),
        "tags": [tag],
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": schema} for place, name, schema in places
        ],
        "security": [] if route.scope is None else [{"bearer": []}, {"x-api-key": []}],
        "responses": {
            str(route.status): {
                "description": HTTPStatus(route.status).phrase,
                "content": {
                    media: {
                        "schema": schemas[route.response]
                        if route.response and media == _JSON
                        else _OTHER_MEDIA.get(media, {"type": "string"})
                    }
                    for media in route.media
                },
            },
            "default": {
                "description": "An error; `error.code` names its kind.",
                "content": {_JSON: {"schema": {"type": "object"} if route.error_body else schemas[ErrorAnswer]}},
            },
        },
    }
    if route.scope is not None:
        operation["description"] = f"Needs a key with scope `{route.scope}`."
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[route.request]}}}
    return operation
