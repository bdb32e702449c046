"""The HTTP side of a server: check the key, find the route, call the runtime, answer.

`ROUTES` lists all endpoints; `GET /openapi.json` shows them with their types. A `Route` declares the key scope, the
wire types and the limits of an endpoint in one place, so that no handler can forget a check. This is plain ASGI without
a web framework: the size of a body is checked while it is read, and a request ends when its client hangs up.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from art.config import ServerConfig
from art.errors import AuthenticationError, KeysUnavailableError, NotFoundError
from art.gateway.json_pieces import json_pieces
from art.gateway.workers import INLINE
from art.protocol.answers import Health, ModelCard, ModelList
from art.protocol.jobs import JobList
from art.protocol.live.system import SystemAnswer
from art.protocol.preflight import PreflightReport
from art.protocol.training import JobStatus, ModelStatus
from art.server.asgi import ClientDisconnected, Receive, Scope, Send, send_bytes
from art.server.auth import ANONYMOUS, Caller, Keyring, read_key
from art.server.bodies.body import BodyLimits
from art.server.call import REST, Call, Route
from art.server.errors import METHOD_NOT_ALLOWED, REQUEST_ID, error_body, failure
from art.server.headers import answer_preflight, is_preflight, request_id, with_headers
from art.server.openapi import build_openapi
from art.server.page.browser import SECURITY_HEADERS, Addresses, read_cookies
from art.server.page.page_state import PageState
from art.server.paths import HiddenPaths
from art.server.routes import (
    chat,
    checkpoints,
    jobs,
    live,
    models,
    operations,
    quotas,
    rollouts,
    stored_responses,
    text,
    training,
    view,
)
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
    *chat.ROUTES,
    *text.ROUTES,
    *stored_responses.ROUTES,
    *models.ROUTES,
    *rollouts.ROUTES,
    *training.ROUTES,
    *checkpoints.ROUTES,
    *jobs.ROUTES,
    *operations.ROUTES,
    *quotas.ROUTES,
    *page_routes.ROUTES,
    *view.ROUTES,
    *live.ROUTES,
]
PAGE_ROUTES = [*page_routes.PAGE_ROUTES, *view.ROUTES]
"""The routes of `art view`, which has files and no server."""

_NAME_FILES = {Health, JobList, JobStatus, ModelCard, ModelList, ModelStatus, PreflightReport, SystemAnswer}
"""Answers that can say where files lie on the machine. Only keys with scope `admin` see that. Events of jobs and
errors are treated where they are sent."""


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
        routes = ROUTES if shown.has_server else PAGE_ROUTES
        self._body_limits = {data: BodyLimits.of(self.state.config, training_data=data) for data in (False, True)}
        self._exact = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._patterns = [(_pattern(route.path), route) for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"{scope['method']} {scope['path']}")  # reports of waiting tasks show this name
        started_at, status, caller = time.perf_counter(), 0, ANONYMOUS
        route, path = self._find(scope["method"], scope["path"])
        identity, origins = request_id(scope), self.state.config.cors_origins
        REQUEST_ID.set(identity)
        more = dict(SECURITY_HEADERS) if route is not None and route.from_page else {}
        send = with_headers(scope, send, identity, origins, more)

        async def send_noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if is_preflight(scope, origins):
                await answer_preflight(scope, send_noted)
                return
            if b"%2f" in scope.get("raw_path", b"").lower() and (route is None or not route.has_rest):
                raise NotFoundError("a path cannot have an encoded slash")  # decoded, it would match another route
            caller = self._identify(scope, route)
            if route is None:
                await self._refuse(scope, send_noted)
                return
            limits = self._body_limits[route.training_data]
            call = Call(self._runtime, scope, receive, send_noted, self.state, path, caller, limits, more)
            await self._answer(route, call)
        except ClientDisconnected:
            pass
        except Exception as error:
            if status:  # too late for another answer: close the connection
                raise
            shown = error if caller.may("admin") else self.state.paths.hide_in(error)
            error_status, body, headers = failure(shown, None if route is None else route.error_body)
            await send_bytes(send_noted, error_status, body, headers=headers)
        finally:
            name = "(none)" if route is None else route.path
            self.state.metrics.observe(scope["method"], name, status or CLIENT_LEFT, time.perf_counter() - started_at)

    async def _answer(self, route: Route, call: Call) -> None:
        if route.scope is None:  # health checks are not limited
            await _run(route, call)
            return
        call.caller.check_scope(route.scope)
        with self.state.limiter.admit(call.caller, samples=route.samples):
            await self._check_path(call.path, call.caller)
            await _run(route, call)

    def _identify(self, scope: Scope, route: Route | None) -> Caller:
        page, keyring = self.state.page, self.state.keyring
        # A session learns that an address does not exist. Without one, unknown routes look like known ones.
        from_page = scope["path"].startswith(view.BASE) if route is None else route.from_page
        if from_page and read_key(scope) is None:
            if route is not None and route.scope is None and route.method == "GET":
                page.addresses.check_host(scope)  # a link on any other page may lead here
            elif route is not None and route.scope is None:
                page.addresses.check_page_request(scope)
            elif texts := read_cookies(scope, https=page.addresses.is_https(scope)):
                page.addresses.check_page_request(scope)
                return keyring.caller(page.sessions.find(*texts).key_id)
        try:
            return keyring.identify(scope)
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

    def _find(self, method: str, path: str) -> tuple[Route | None, dict[str, str]]:
        if method == "HEAD":  # monitors ask so whether a server is well; other routes would work for nothing
            route, values = self._find("GET", path)
            return (route, values) if route is not None and route.scope is None else (None, {})
        if (exact := self._exact.get((method, path))) is not None:
            return exact, {}
        for pattern, route in self._patterns:
            if route.method == method and (match := pattern.fullmatch(path)) is not None:
                return route, match.groupdict()
        return None, {}

    async def _refuse(self, scope: Scope, send: Send) -> None:
        """Answer 405 if the path has routes for other methods, else 404."""
        method, path = scope["method"], scope["path"]
        routes = [route for pattern, route in self._patterns if pattern.fullmatch(path)]
        allowed = sorted({route.method for route in routes} | {"HEAD" for route in routes if route.scope is None})
        if not allowed:
            raise NotFoundError(_not_served(path) or f"there is no route {method} {path}")
        methods = ", ".join(allowed)
        body = orjson.dumps(error_body(NotFoundError(f"{path} takes {methods}, not {method}")))
        await send_bytes(send, METHOD_NOT_ALLOWED, body, headers={"allow": methods})


@functools.cache
def _openapi_document() -> bytes:
    # Not orjson: it refuses the bounds of seeds, which have more than 64 bits.
    return json.dumps(build_openapi(ROUTES)).encode()


async def _run(route: Route, call: Call) -> None:
    result = await route.handler(call)
    if result is not None:
        body = await _encode(result)
        await send_bytes(call.send, route.status, call.without_paths(body) if route.response in _NAME_FILES else body)


async def _encode(answer: Any) -> bytes:
    """Encode an answer. Between parts of a large one, others are answered."""
    if isinstance(answer, dict) and not any(isinstance(one, list) and len(one) > 1 for one in answer.values()):
        return orjson.dumps(answer)  # one choice, which would be one piece
    body, size = bytearray(), 0
    for piece in json_pieces(answer, 2):
        body += piece
        if len(body) - size > INLINE:
            size = len(body)
            await asyncio.sleep(0)
    return bytes(body)


def _pattern(path: str) -> re.Pattern[str]:
    path = path.replace(f"{{{REST}}}", f"(?P<{REST}>.+)")
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


def _not_served(path: str) -> str | None:
    """Why a well-known address of OpenAI's API has no route here; `None` for other addresses."""
    kind = path.partition("/v1/")[2].partition("/")[0]
    if kind not in _NOT_SERVED:
        return None
    return f"this server samples text and serves no {_NOT_SERVED[kind]}; ask another server for them"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
