"""The HTTP side of a server: check the key, find the route, call the runtime, answer.

`ROUTES` lists the endpoints, to which pages of other packages add theirs; `GET /openapi.json` shows all of them with
their types. A `Route` declares the key scope, the wire types and the limits of an endpoint in one place, so that no
handler can forget a check. Starlette finds the path of a request; what happens then, in which order, is in
`App.answer`, the same for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import orjson
from starlette import routing
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from art.config import ServerConfig
from art.errors import AuthenticationError, ConfigError, KeysUnavailableError, NotFoundError
from art.plugins import find_plugins, load_plugin
from art.protocol.answers import Health, ModelList
from art.protocol.training import JobList, JobStatus, ModelStatus, PreflightReport
from art.server.answers import METHOD_NOT_ALLOWED, REQUEST_ID, encode_json, error_body, failure, json_response
from art.server.auth import ANONYMOUS, Caller, Keyring, read_key
from art.server.call import PAGE_HEADERS, ApiCall, Page, Route, build_openapi
from art.server.routes import checkpoints, jobs, models, operations, sampling
from art.server.state import HiddenPaths, ServerState
from art.storage.keys import KeyStore
from art.storage.layout import validate_name

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime

CLIENT_LEFT = 499
"""Status in the metrics for a request whose client hung up before the answer; nginx uses the same number."""
ROUTES: list[Route] = [
    *sampling.ROUTES, *models.ROUTES, *checkpoints.ROUTES, *jobs.ROUTES, *operations.ROUTES,
]  # fmt: skip
"""The server's own routes. `App.routes` has those of the installed pages too."""

_NAME_FILES = {Health, JobList, JobStatus, ModelList, ModelStatus, PreflightReport}
"""Answers that can say where files lie on the machine. Only keys with scope `admin` see that. Errors are
treated where they are sent."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class App:
    """The ART server as an ASGI application. Its `runtime` does the work; the caller starts and closes it."""

    def __init__(
        self,
        runtime: Runtime | None,
        *,
        api_key: str,
        config: ServerConfig | None = None,
        keys: KeyStore | None = None,
        data_dir: Path | None = None,
        pages: Sequence[Callable[[ServerState, Runtime | None], Page]] | None = None,
    ) -> None:
        """
        Args:
            runtime: `None` for `art view`, which has files only: then there are only the routes of the pages.
            api_key: the API key that may do everything.
            keys: store of further API keys, which `art keys` makes.
            data_dir: the folder of the runtime's files. Answers to keys without scope `admin` do not show where it is.
            pages: classes of the pages; by default those of the entry points in the group `art.pages`.
        """
        self._runtime = cast("Runtime", runtime)  # without one there is no route that asks it
        config = config or ServerConfig()
        self.state = ServerState(config, self._openapi, HiddenPaths(data_dir), Keyring(api_key, keys))
        if pages is None:
            pages = [load_plugin("art.pages", name) for name in find_plugins("art.pages")]
        self.pages = [make(self.state, runtime) for make in pages]
        self._document = b""
        by_path: dict[str, dict[str, Route]] = {}
        added = [route for page in self.pages for route in page.routes()]
        for route in added if runtime is None else [*ROUTES, *added]:
            if by_path.setdefault(route.path, {}).setdefault(route.method, route) is not route:
                raise ConfigError(f"an installed page adds {route.method} {route.path}, which the server has already")
        self.routes = [route for routes in by_path.values() for route in routes.values()]
        """All routes: the server's own and those of the pages."""
        # Paths without parameters are looked at first, since a parameter may match their last part.
        ordered = sorted(by_path.items(), key=lambda item: "{" in item[0])
        paths = [routing.Route(path, _Path(self, routes)) for path, routes in ordered]
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
        sent_id = request.headers.get("x-request-id", "")
        identity = sent_id if _SANE_ID.fullmatch(sent_id) else f"req_{os.urandom(12).hex()}"
        REQUEST_ID.set(identity)
        # Anthropic's clients read the id from `request-id`, OpenAI's from `x-request-id`.
        headers = {"x-request-id": identity, "request-id": identity}
        if route is not None and route.from_page:
            headers |= PAGE_HEADERS
        response: Response | None = None
        try:
            with contextlib.ExitStack() as held:
                try:
                    if b"%2f" in request.scope.get("raw_path", b"").lower():
                        raise NotFoundError("a path cannot have an encoded slash")  # decoded, it matches another route
                    caller = self._identify(request, route)
                    if route is None:
                        response = _refusal(routes, request)
                    else:
                        path, data = request.path_params, route.training_data
                        call = ApiCall(self._runtime, request, self.state, path, caller, data, headers)
                        if route.scope is not None:  # health checks are not limited
                            caller.check_scope(route.scope)
                            held.enter_context(self.state.limiter.admit(caller, samples=route.samples))
                            await self._check_path(path, caller)
                        answer = await route.handler(call)
                        if isinstance(answer, Response):
                            response = answer
                        else:
                            body = await encode_json(answer)
                            body = call.without_paths(body) if route.response in _NAME_FILES else body
                            response = json_response(body, route.status)
                except ClientDisconnect:
                    return
                except Exception as error:
                    shown = error if caller.may("admin") else self.state.paths.hide_in(error)
                    response = failure(shown, None if route is None else route.error_body)
                status = response.status_code
                own = {name for name, _ in response.raw_headers}
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                response.raw_headers += [header for header in added if header[0] not in own]
                await response(request.scope, request.receive, send)
        finally:
            name = "(none)" if route is None else route.path
            self.state.metrics.observe(request.method, name, status, time.perf_counter() - started_at)

    def _identify(self, request: Request, route: Route | None) -> Caller:
        if read_key(request) is None and (route is None or route.from_page):
            for page in self.pages:
                if (caller := page.identify(request, route)) is not None:
                    return caller
        try:
            return self.state.keyring.identify(request)
        except (AuthenticationError, KeysUnavailableError):
            if route is None or route.scope is not None:  # without a key, unknown routes look like known ones
                raise
            return ANONYMOUS

    def _openapi(self) -> bytes:
        # Not orjson: it refuses the bounds of seeds, which have more than 64 bits.
        self._document = self._document or json.dumps(build_openapi(self.routes)).encode()
        return self._document

    def close(self) -> None:
        """Close the pages."""
        for page in self.pages:
            page.close()

    async def _check_path(self, path: dict[str, str], caller: Caller) -> None:
        """Check the parameters of the path, for every route: each is a valid name, and the caller may use it.

        Raises:
            InvalidRequestError: a parameter is not a valid name.
            PermissionDeniedError: the project is another one than the key's.
            NotFoundError: the job belongs to another project than the key's.
        """
        for param, value in path.items():
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


def _refusal(routes: Mapping[str, Route], request: Request) -> Response:
    """Answer 405 if the path has routes for other methods, else 404."""
    method, path = request.method, request.scope["path"]
    if not routes:
        raise NotFoundError(f"there is no route {method} {path}; GET /openapi.json lists all")
    methods = ", ".join(sorted({*routes} | {"HEAD" for route in routes.values() if route.scope is None}))
    body = orjson.dumps(error_body(NotFoundError(f"{path} takes {methods}, not {method}")))
    return json_response(body, METHOD_NOT_ALLOWED, {"allow": methods})
