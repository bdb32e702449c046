"""The HTTP skin of a server: check the key, find the route, call the runtime, answer.

    GET  /health  /ready                                  details with a key for all projects only
    GET  /metrics                                         for Prometheus
    GET  /openapi.json                                    made from the table of routes
    GET  /v1/models                                       those under /v1/ also under /rollouts/{rollout_id}/v1/,
    POST /v1/chat/completions                             which records them under that rollout, and each of both
    POST /v1/responses                                    also under /projects/{project}, where a name without
    POST /v1/messages                                     project is first looked for
    POST /v1/messages/count_tokens
    GET  /api/rollouts?group_id=&finished=&since= ...
    GET  /api/rollouts/{rollout_id}
    PUT  /api/rollouts/{rollout_id}                       its group, reward and end
    POST /api/models
    GET  /api/models/{project}/{name}
    POST /api/models/{project}/{name}/train               202 and a job
    POST /api/models/{project}/{name}/train_sft           202 and a job
    GET  /api/models/{project}/{name}/checkpoints
    POST /api/models/{project}/{name}/checkpoints/delete
    GET  /api/models/{project}/{name}/checkpoints/{step}[/exports/{format}]/files[/{file}]
    POST /api/models/{project}/{name}/metrics
    POST /api/models/{project}/{name}/fork, /export, /push, /pull         202 and a job
    GET  /api/jobs?project=&name=&unfinished=&limit=
    GET  /api/jobs/{job_id}?wait_s=
    GET  /api/jobs/{job_id}/events                        server-sent events, resumed by Last-Event-ID
    POST /api/jobs/{job_id}/cancel

Plain ASGI: agents send hundreds of chat requests per training step, and a web framework would take longer over each one
than all else in this process together.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import MutableMapping
from typing import Any

import orjson
from pydantic import BaseModel

from art.config import ServerConfig
from art.errors import AuthenticationError, NotFoundError
from art.server.asgi import ClientDisconnected, Receive, Scope, Send, send_bytes, send_failure
from art.server.auth import ANONYMOUS, Caller, Keyring
from art.server.call import Call, Route, RuntimeApi
from art.server.errors import METHOD_NOT_ALLOWED, error_body
from art.server.openapi import build_openapi
from art.server.routes import chat, checkpoints, dialects, jobs, models, operations, rollouts, training
from art.server.state import ServerState
from art.storage.keys import KeyStore
from art.storage.layout import validate_name

CLIENT_LEFT = 499
"""Status in the metrics of a request whose client was gone before its answer; nginx writes the same."""
ROUTES: list[Route] = [
    *chat.ROUTES,
    *dialects.ROUTES,
    *models.ROUTES,
    *rollouts.ROUTES,
    *training.ROUTES,
    *checkpoints.ROUTES,
    *jobs.ROUTES,
    *operations.ROUTES,
]


def create_app(
    runtime: RuntimeApi, *, api_key: str, config: ServerConfig | None = None, keys: KeyStore | None = None
) -> App:
    """The ASGI application of a running `runtime`, whose life cycle is the caller's business.

    Args:
        api_key: may do everything.
        keys: further ones.
    """
    return App(runtime, Keyring(api_key, keys), config or ServerConfig())


class App:
    """An ASGI application."""

    def __init__(self, runtime: RuntimeApi, keyring: Keyring, config: ServerConfig) -> None:
        self._runtime = runtime
        self._keyring = keyring
        self.state = ServerState(config, _openapi_document)
        self._exact = {(route.method, route.path): route for route in ROUTES if "{" not in route.path}
        self._patterns = [(_pattern(route.path), route) for route in ROUTES]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"{scope['method']} {scope['path']}")  # as reports of who waits for whom show it
        started_at, status = time.perf_counter(), 0
        route, path = self._find(scope["method"], scope["path"])

        async def send_noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answer(route, path, scope, receive, send_noted)
        except ClientDisconnected:
            pass
        except Exception as error:
            if status:  # too late for another answer: close the connection
                raise
            await send_failure(send_noted, error, None if route is None else route.error_body)
        finally:
            name = "(none)" if route is None else route.path
            self.state.metrics.observe(scope["method"], name, status or CLIENT_LEFT, time.perf_counter() - started_at)

    async def _answer(
        self, route: Route | None, path: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if b"%2f" in scope.get("raw_path", b"").lower():  # decoded, it would make another route of this
            raise NotFoundError("a path cannot have an encoded slash")
        caller = self._identify(scope, route)
        if route is None:
            await self._refuse(scope, send)
            return
        call = Call(self._runtime, scope, receive, send, self.state, path, caller)
        if route.scope is None:  # asked by those who watch the server: always answered
            await _run(route, call)
            return
        caller.check_scope(route.scope)
        with self.state.limiter.admit(caller, samples=route.samples):
            await self._check_path(path, caller)
            await _run(route, call)

    def _identify(self, scope: Scope, route: Route | None) -> Caller:
        try:
            return self._keyring.identify(scope)
        except AuthenticationError:
            if route is None or route.scope is not None:  # without a key nobody learns which routes there are
                raise
            return ANONYMOUS

    async def _check_path(self, path: dict[str, str], caller: Caller) -> None:
        """Names in the URL are safe, and the caller's own. Done here so that no route can forget it.

        Raises:
            InvalidRequestError: not a name. PermissionDeniedError: of another project. NotFoundError: likewise, a job.
        """
        for param, value in path.items():
            validate_name(value, param=param)
        if caller.project is None:
            return
        if (project := path.get("project")) is not None:
            caller.check_project(project)
        if (job_id := path.get("job_id")) is not None:
            job = await self._runtime.job_status(job_id, 0.0)
            if job.project != caller.project:
                raise NotFoundError(f"there is no job {job_id!r}", param="job_id")

    def _find(self, method: str, path: str) -> tuple[Route | None, dict[str, str]]:
        if (exact := self._exact.get((method, path))) is not None:
            return exact, {}
        for pattern, route in self._patterns:
            if route.method == method and (match := pattern.fullmatch(path)) is not None:
                return route, match.groupdict()
        return None, {}

    async def _refuse(self, scope: Scope, send: Send) -> None:
        """404, or 405 where other methods have a route."""
        method, path = scope["method"], scope["path"]
        allowed = sorted({route.method for pattern, route in self._patterns if pattern.fullmatch(path)})
        if not allowed:
            raise NotFoundError(f"there is no route {method} {path}")
        methods = ", ".join(allowed)
        error = NotFoundError(f"{path} takes {methods}, not {method}")
        body = error_body(error, METHOD_NOT_ALLOWED)
        await send_bytes(send, METHOD_NOT_ALLOWED, body, headers={"allow": methods})


@functools.cache
def _openapi_document() -> bytes:
    return json.dumps(build_openapi(ROUTES)).encode()  # not orjson: bounds of seeds have more than 64 bits


async def _run(route: Route, call: Call) -> None:
    result = await route.handler(call)
    if result is not None:
        body = result.model_dump_json().encode() if isinstance(result, BaseModel) else orjson.dumps(result)
        await send_bytes(call.send, route.status, body)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
