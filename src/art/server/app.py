"""The HTTP side of a server: check the key, find the route, call the runtime, answer.

`ROUTES` lists all endpoints; `GET /openapi.json` shows them with their types. A `Route` declares the key scope, the
wire types and the limits of an endpoint in one place, so that no handler can forget a check. Starlette finds the path
of a request; what happens then, in which order, is in `App.answer`, the same for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from starlette import routing
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from art.config import ServerConfig
from art.errors import AuthenticationError, KeysUnavailableError, NotFoundError
from art.protocol.answers import Health, ModelCard, ModelList
from art.protocol.jobs import JobList
from art.protocol.live.system import SystemAnswer
from art.protocol.preflight import PreflightReport
from art.protocol.training import JobStatus, ModelStatus
from art.server.answers import encode_json, json_response
from art.server.auth import ANONYMOUS, Caller, Keyring, read_key
from art.server.body import BodyLimits
from art.server.call import REST, Call, Route
from art.server.errors import METHOD_NOT_ALLOWED, REQUEST_ID, error_body, failure
from art.server.openapi import build_openapi
from art.server.page.browser import SECURITY_HEADERS, Addresses, read_cookies
from art.server.page.sessions import PageState
from art.server.paths import HiddenPaths
from art.server.routes import checkpoints, jobs, models, operations, sampling, stored_responses
from art.server.routes import page as page_routes
from art.server.state import ServerState
from art.storage.keys import KeyStore
from art.storage.layout import validate_name

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime

CLIENT_LEFT = 499
"""Status in the metrics for a request whose client hung up before the answer; nginx uses the same number."""
_NOT_SERVED = {
    "embeddings": "embeddings", "images": "images", "audio": "audio", "files": "files",
    "moderations": "moderation", "batches": "batches", "realtime": "realtime sessions", "assistants": "assistants",
    "threads": "threads", "vector_stores": "vector stores", "fine_tuning": "fine-tuning jobs of OpenAI",
}  # fmt: skip
"""What follows `/v1/` in addresses of OpenAI's API that clients know and ART does not serve."""
ROUTES: list[Route] = [
    *sampling.ROUTES,
    *stored_responses.ROUTES,
    *models.ROUTES,
    *checkpoints.ROUTES,
    *jobs.ROUTES,
    *operations.ROUTES,
    *page_routes.ROUTES,
]

_NAME_FILES = {Health, JobList, JobStatus, ModelCard, ModelList, ModelStatus, PreflightReport, SystemAnswer}
"""Answers that can say where files lie on the machine. Only keys with scope `admin` see that. Events of jobs and
errors are treated where they are sent."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class App:
    """The ART server as an ASGI application. Its `runtime` does the work; the caller starts and closes it."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        api_key: str,
        config: ServerConfig | None = None,
        keys: KeyStore | None = None,
        data_dir: Path | None = None,
        page: PageState | None = None,
    ) -> None:
        """
        Args:
            api_key: the API key that may do everything.
            keys: store of further API keys, which `art keys` makes.
            data_dir: the folder of the runtime's files. Answers to keys without scope `admin` do not show where it is.
            page: what the page shows, by default nothing. Without a server beside it, there are only its own routes.
        """
        self._runtime = runtime
        config, keyring = config or ServerConfig(), Keyring(api_key, keys)
        shown = page or PageState(None, Addresses(config.host, config.public_urls))
        self.state = ServerState(config, _openapi_document, HiddenPaths(data_dir), keyring, shown)
        self._body_limits = {data: BodyLimits.of(self.state.config, training_data=data) for data in (False, True)}
        by_path: dict[str, dict[str, Route]] = {}
        for route in ROUTES if shown.has_server else page_routes.PAGE_ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        paths = [
            routing.Route(_pattern(path), _Path(self, routes))
            for path, routes in sorted(by_path.items(), key=_has_parameters)
        ]
        self._asgi: ASGIApp = routing.Router(paths, redirect_slashes=False, default=_Path(self, {}))
        if config.cors_origins:
            self._asgi = CORSMiddleware(
                self._asgi, allow_origins=config.cors_origins, expose_headers=["*"], allow_headers=["*"],
                allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    async def answer(self, routes: Mapping[str, Route], request: Request, send: Send) -> None:
        """Answer a request. `routes` has the routes of its path, by method."""
        started_at, status, caller = time.perf_counter(), CLIENT_LEFT, ANONYMOUS
        route = routes.get(request.method)
        if request.method == "HEAD" and (got := routes.get("GET")) is not None and got.scope is None:
            route = got  # monitors ask so whether a server is well; other routes would work for nothing
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"{request.method} {request.scope['path']}")  # reports of waiting tasks show this name
        sent_id = request.headers.get("x-request-id", "")
        identity = sent_id if _SANE_ID.fullmatch(sent_id) else f"req_{os.urandom(12).hex()}"
        REQUEST_ID.set(identity)
        # Anthropic's clients read the id from `request-id`, OpenAI's from `x-request-id`.
        headers = {"x-request-id": identity, "request-id": identity}
        if route is not None and route.from_page:
            headers |= SECURITY_HEADERS
        response: Response | None = None
        try:
            with contextlib.ExitStack() as held:
                try:
                    if b"%2f" in request.scope.get("raw_path", b"").lower() and not (route and route.has_rest):
                        raise NotFoundError("a path cannot have an encoded slash")  # decoded, it matches another route
                    caller = self._identify(request, route)
                    if route is None:
                        response = _refusal(routes, request)
                    else:
                        path, limits = request.path_params, self._body_limits[route.training_data]
                        call = Call(self._runtime, request, self.state, path, caller, limits, headers)
                        if route.scope is not None:  # health checks are not limited
                            caller.check_scope(route.scope)
                            held.enter_context(self.state.limiter.admit(caller, samples=route.samples))
                            await self._check_path(path, caller)
                        response = await _run(route, call)
                except ClientDisconnect:
                    return
                except Exception as error:
                    shown = error if caller.may("admin") else self.state.paths.hide_in(error)
                    response = failure(shown, None if route is None else route.error_body)
                status = response.status_code
                response.raw_headers += [(name.encode(), value.encode()) for name, value in headers.items()]
                await response(request.scope, request.receive, send)
        finally:
            name = "(none)" if route is None else route.path
            self.state.metrics.observe(request.method, name, status, time.perf_counter() - started_at)

    def _identify(self, request: Request, route: Route | None) -> Caller:
        page, keyring = self.state.page, self.state.keyring
        # A session learns that an address does not exist. Without one, unknown routes look like known ones.
        from_page = request.scope["path"].startswith(page_routes.BASE) if route is None else route.from_page
        if from_page and read_key(request) is None:
            if route is not None and route.scope is None and route.method == "GET":
                page.addresses.check_host(request)  # a link on any other page may lead here
            elif route is not None and route.scope is None:
                page.addresses.check_page_request(request)
            elif texts := read_cookies(request, https=page.addresses.is_https(request)):
                page.addresses.check_page_request(request)
                return keyring.caller(page.sessions.find(*texts).key_id)
        try:
            return keyring.identify(request)
        except (AuthenticationError, KeysUnavailableError):
            if route is None or route.scope is not None:  # without a key, unknown routes look like known ones
                raise
            return ANONYMOUS

    async def _check_path(self, path: dict[str, str], caller: Caller) -> None:
        """Check the parameters of the path, for every route: each is a valid name, and the caller may use it.

        Raises:
            InvalidRequestError: a parameter is not a valid name.
            PermissionDeniedError: the project is another one than the key's.
            NotFoundError: the job belongs to another project than the key's.
        """
        for param, value in path.items():
            if param != REST:
                validate_name(value, param=param)
        if caller.project is None:
            return
        if (project := path.get("project")) is not None:
            caller.check_project(project)
        if (job_id := path.get("job_id")) is not None:
            job = await self._runtime.jobs.status(job_id)
            if job.project != caller.project:
                raise NotFoundError(f"there is no job {job_id!r}", param="job_id")


@dataclass(frozen=True, slots=True)
class _Path:
    """The ASGI application of one path: its routes by method. Without any, it answers that there is none."""

    app: App
    routes: Mapping[str, Route]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.app.answer(self.routes, Request(scope, receive), send)
        else:
            await send({"type": "websocket.close", "code": 1000})


def _has_parameters(item: tuple[str, Any]) -> bool:
    """Sorts paths: those without parameters are looked at first, since a parameter may match their last part."""
    return "{" in item[0]


def _pattern(path: str) -> str:
    return path.replace(f"{{{REST}}}", f"{{{REST}:path}}")


def _refusal(routes: Mapping[str, Route], request: Request) -> Response:
    """Answer 405 if the path has routes for other methods, else 404."""
    method, path = request.method, request.scope["path"]
    if not routes:
        raise NotFoundError(_not_served(path) or f"there is no route {method} {path}")
    methods = ", ".join(sorted({*routes} | {"HEAD" for route in routes.values() if route.scope is None}))
    body = orjson.dumps(error_body(NotFoundError(f"{path} takes {methods}, not {method}")))
    return json_response(body, METHOD_NOT_ALLOWED, {"allow": methods})


@functools.cache
def _openapi_document() -> bytes:
    # Not orjson: it refuses the bounds of seeds, which have more than 64 bits.
    return json.dumps(build_openapi(ROUTES)).encode()


async def _run(route: Route, call: Call) -> Response:
    result = await route.handler(call)
    if isinstance(result, Response):
        return result
    body = await encode_json(result)
    return json_response(call.without_paths(body) if route.response in _NAME_FILES else body, route.status)


def _not_served(path: str) -> str | None:
    """Why a well-known address of OpenAI's API has no route here; `None` for other addresses."""
    kind = path.partition("/v1/")[2].partition("/")[0]
    if kind not in _NOT_SERVED:
        return None
    return f"this server samples text and serves no {_NOT_SERVED[kind]}; ask another server for them"
