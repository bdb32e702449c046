"""The page: its files and login, what it shows as JSON (one route for each row of `art.viewer.paths`), and what happens
now, as server-sent events. These routes are for browsers; programs send their key to all others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator
from urllib.parse import parse_qs

from starlette.responses import Response

from art.errors import AuthenticationError, NotFoundError, PermissionDeniedError
from art.protocol.keys import Empty, LoginRequest, PageLink, PageSession
from art.protocol.live.events import LiveEvent
from art.protocol.live.system import SystemAnswer
from art.server.answers import UNBUFFERED, EventStream, json_response
from art.server.auth import Caller
from art.server.call import Call, Handler, Route
from art.server.openapi import art_version
from art.server.page.browser import make_cookie, read_cookies
from art.viewer.page_files import INDEX, page_files
from art.viewer.paths import PATHS, ReadPath, RunsQuery, query_parameters
from art.viewer.viewer import Viewer

_FOR_EVER = "public, max-age=31536000, immutable"
NOT_MODIFIED = 304
BASE = "/view/api/"
HEARTBEAT_S = 15.0
"""Longest time without a byte on a stream. Proxies close connections that are silent for a minute."""
RETRY_MS = 1000
"""Milliseconds after which a browser reconnects to a broken stream of events."""
_SAMPLED = frozenset({"request_started", "tokens"})
"""Events that hold what models wrote, and nothing of the machine."""


async def index(call: Call) -> Response:
    """Show the page. It asks for a key if the browser has no session."""
    files = await asyncio.to_thread(page_files)
    etag, fields = f'"{files.version}"', {"cache-control": "no-cache"}
    if call.header("if-none-match") == etag:
        return Response(status_code=NOT_MODIFIED, headers=fields | {"etag": etag})
    return _file(files.index(f"static/{files.version}/"), INDEX, fields | {"etag": etag})


async def static_file(call: Call) -> Response:
    """Send a file of the page. Its address changes with its content, so browsers may keep it for ever."""
    files = await asyncio.to_thread(page_files)
    name = "/".join(call.path[part] for part in ("folder", "file") if part in call.path)
    if call.path["version"] != files.version or name not in files.content:
        raise NotFoundError("there is no such file of the page; reload the page if the server was updated")
    return _file(files.content[name], name, {"cache-control": _FOR_EVER})


def _file(body: bytes, name: str, fields: dict[str, str]) -> Response:
    return Response(body, headers=fields | {"content-type": page_files().content_type(name)})


async def login(call: Call) -> Response:
    """Open a session of the page, by a key or a one-time code, and set its cookie."""
    request, page = await call.body(LoginRequest), call.server.page
    address = call.request.client.host if call.request.client else "?"
    page.failed_logins.check(address)
    try:
        if request.key is not None:
            caller = call.server.keyring.find(request.key.encode("latin-1", "replace"))
        else:
            caller = call.server.keyring.caller(page.sessions.redeem(request.code or ""))
    except AuthenticationError as error:
        page.failed_logins.note(address)
        if request.key is not None and error.message.startswith("the API key is wrong"):
            raise AuthenticationError("this key does not open the page of this server") from None
        raise
    caller.check_scope("infer")  # all that the page shows needs it
    text, _ = page.sessions.open(caller.key_id)
    cookie = make_cookie(call.request, text, https=page.addresses.is_https(call.request))
    body = _describe(call, caller).model_dump_json().encode()
    return json_response(body, headers={"set-cookie": cookie, "cache-control": "no-store"})


async def session(call: Call) -> PageSession:
    """Return what this session of the page, or this key, may do."""
    return _describe(call, call.caller)


def _describe(call: Call, caller: Caller) -> PageSession:
    has_server = call.server.page.has_server
    return PageSession(
        key_id=caller.key_id, project=caller.project, scopes=sorted(caller.scopes), has_server=has_server,
        base_url=f"{call.request.scope['scheme']}://{call.header('host')}/v1" if has_server else None,
        version=art_version(),
    )  # fmt: skip


async def logout(call: Call) -> Response:
    """End the session, and remove its cookie."""
    await call.body(Empty)
    https = call.server.page.addresses.is_https(call.request)
    for text in read_cookies(call.request, https=https):
        call.server.page.sessions.close(text)
    return json_response(b"{}", headers={"set-cookie": make_cookie(call.request, "", https=https)})


async def make_link(call: Call) -> PageLink:
    """Make a one-time code that opens the page in a browser, with the rights of the key that asks."""
    await call.body(Empty)
    code, expires_at = call.server.page.sessions.make_code(call.caller.key_id)
    return PageLink(code=code, expires_at=expires_at)


# -- what it shows --


def _handler(row: ReadPath) -> Handler:
    """Make the handler of a row."""

    async def answer(call: Call) -> Response:
        asked = row.asked(call.path, parse_qs(call.request.scope["query_string"].decode("latin-1")))
        if row.query is RunsQuery and call.caller.project is not None:  # the only path that covers several projects
            call.caller.check_project(asked.query.project or call.caller.project)
            asked = row.asked(call.path, {"project": [call.caller.project]})
        elif "project" not in row.path and call.caller.project is not None:
            raise PermissionDeniedError(
                f"key {call.caller.key_id} is for project {call.caller.project!r}, and comparisons of models can have "
                "models of several projects",
                param="project",
            )
        known = call.header("if-none-match")

        def read(viewer: Viewer) -> tuple[str, bytes | None]:
            """Return the tag of the answer, and the answer if the browser does not have it."""
            project = asked.values.get("project") or getattr(asked.query, "project", None)
            etag = _etag(call, viewer.version(project, asked.values.get("name"), of_log=row.is_of_log))
            return etag, None if etag == known else row.read(viewer, asked).model_dump_json().encode()

        etag, body = await call.server.page.read(read)
        headers = {"etag": etag, "cache-control": "private, no-cache", "vary": "cookie, authorization"}
        if body is None:
            return Response(status_code=NOT_MODIFIED, headers=headers)
        return json_response(call.without_paths(body) if row.names_files else body, headers=headers)

    answer.__doc__ = f"{row.summary[0].upper()}{row.summary[1:]}, for the page."
    return answer


def _etag(call: Call, version: str) -> str:
    """Tag of an answer: of the files, of what was asked, and of who asked, since not all see the same."""
    parts = (
        version,
        call.request.scope["path"],
        call.request.scope["query_string"].decode("latin-1"),
        call.caller.key_id,
    )
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"'


# -- what happens now --


async def system(call: Call) -> SystemAnswer:
    """Return processes, memory, queues, throughput, running jobs and disk of the server."""
    return await call.runtime.overview.system(call.caller.project)


async def live(call: Call) -> EventStream:
    """Stream what agents say while it is sampled, and how training goes on."""
    events = call.runtime.live.watch(call.caller.project)

    async def frames() -> AsyncGenerator[bytes, None]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        checked_at = time.monotonic()
        async with contextlib.aclosing(with_heartbeats(events)) as beating:
            async for batch in beating:
                if time.monotonic() - checked_at > HEARTBEAT_S:
                    call.server.keyring.caller(call.caller.key_id)  # raises if the key was revoked: the stream ends
                    checked_at = time.monotonic()
                yield b": alive\n\n" if batch is None else b"".join([_frame(call, event) for event in batch])

    return EventStream(frames(), UNBUFFERED)


async def with_heartbeats(
    events: AsyncGenerator[list[LiveEvent], None], silence_s: float = HEARTBEAT_S
) -> AsyncGenerator[list[LiveEvent] | None, None]:
    """Yield the batches of events, and `None` after each `silence_s` seconds without one."""
    async with contextlib.aclosing(events):
        coming: asyncio.Task[list[LiveEvent]] = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=silence_s)
                if not done:
                    yield None
                    continue
                try:
                    batch = coming.result()
                except StopAsyncIteration:
                    return
                yield batch
                coming = asyncio.ensure_future(anext(events))
        finally:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming


def _frame(call: Call, event: LiveEvent) -> bytes:
    shown = event.body if event.data.kind in _SAMPLED else call.without_paths(event.body)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, event.data.kind.encode(), shown)


_HTML, _ANY = ("text/html",), ("text/javascript", "text/css", "image/svg+xml", "text/plain")
PAGE_ROUTES = [
    Route("GET", "/", index, scope=None, media=_HTML, from_page=True),
    Route("GET", "/static/{version}/{file}", static_file, scope=None, media=_ANY, from_page=True),
    Route("GET", "/static/{version}/{folder}/{file}", static_file, scope=None, media=_ANY, from_page=True),
    Route("POST", "/view/login", login, scope=None, request=LoginRequest, response=PageSession, from_page=True),
    Route("POST", "/view/logout", logout, scope=None, request=Empty, response=Empty, from_page=True),
    Route("GET", "/view/api/session", session, scope="infer", response=PageSession, from_page=True),
    *(
        Route(
            "GET", BASE + row.path, _handler(row), scope="infer", response=row.answer, query=query_parameters(row),
            from_page=True,
        )
        for row in PATHS
    ),
]  # fmt: skip
"""The routes of `art view`, which has files and no server."""
ROUTES = [
    *PAGE_ROUTES,
    Route("POST", "/view/links", make_link, scope="infer", request=Empty, response=PageLink),
    Route("GET", "/view/api/system", system, scope="infer", response=SystemAnswer, from_page=True),
    Route("GET", "/view/api/live", live, scope="infer", media=("text/event-stream",), from_page=True),
]  # fmt: skip
