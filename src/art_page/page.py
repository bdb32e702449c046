"""The page: its files and login, what it shows as JSON (one route for each row of `PATHS`), and what happens now, as
server-sent events. These routes are for browsers; programs send their key to all others.

The files are part of the package (`bundle.py` joins them). Nothing that a request says becomes part of a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gzip
import hashlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_origin, get_type_hints
from urllib.parse import parse_qs, unquote

from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response

import art
from art.errors import AuthenticationError, InvalidRequestError, NotFoundError, PermissionDeniedError
from art.protocol.chat_completions import invalid_request
from art.protocol.keys import LOGIN_MARK, Empty, KeyScope, PageLink
from art.protocol.live import LiveEvent, SystemAnswer
from art.protocol.training import Wire
from art.server.answers import UNBUFFERED, EventStream, json_response
from art.server.auth import SERVER_KEY_ID, Caller
from art.server.call import ApiCall, Page, Route
from art.server.state import ServerState
from art.storage.labels import LabelChanges, RunLabels
from art.storage.layout import DataDir, validate_name
from art_page.bundle import CONTENT_TYPES, page_files
from art_page.rollout_answers import (
    PageAnswer,
    PageQuery,
    RequestQuery,
    RolloutKey,
    RolloutTableQuery,
    TokensQuery,
    TreeQuery,
)
from art_page.run_answers import CompareQuery, SeriesQuery
from art_page.sessions import Addresses, FailedLogins, Sessions, make_cookie, read_cookies
from art_page.several import Viewers, call_viewer
from art_page.viewer import Viewer

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime

T = TypeVar("T")
AnyViewer = Viewer | Viewers

BASE = "/view/api/"
READERS = 3
"""Threads that read for the page. It has its own, so that a slow view holds up nothing of training and sampling."""
RETRY_MS = 1000
"""Milliseconds after which a browser reconnects to a broken stream of events."""
_SAMPLED = frozenset({"request_started", "tokens"})
"""Events that hold what models wrote, and nothing of the machine."""
_HTML, _ANY = ("text/html",), ("text/javascript", "text/css", "image/svg+xml", "text/plain")


class LoginRequest(Wire):
    """Open a session of the page, by a key or by the one-time code of a login link."""

    key: str | None = Field(default=None, max_length=512)
    code: str | None = Field(default=None, max_length=128)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.key is None) == (self.code is None):
            raise ValueError("give `key` or `code`, and not both")
        return self


class PageSession(Wire):
    """What a request of the page may do: as much as the key that opened its session."""

    key_id: str
    project: str | None
    """The only project that it sees; null for all."""
    scopes: list[KeyScope]
    has_server: bool
    """Whether a server runs. False for `art view`, which reads files only."""
    base_url: str | None
    """Where clients find the server's OpenAI-compatible API; null without a server."""
    version: str
    """Version of ART."""


NUMBERS = frozenset({"step", "group", "index"})
"""Parameters of paths that are whole numbers. All others are names."""
_MOST_DIGITS = 9


class RunsQuery(PageQuery):
    """Which runs to list."""

    project: str | None = None
    """Only those of one project."""


class LedgerQuery(PageQuery):
    """Which steps to sum, both ends included; null for no bound."""

    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a path asks for: the run and the parameters in the path, and the query."""

    values: Mapping[str, str]
    query: Any


@dataclass(frozen=True, slots=True)
class ReadPath:
    """One row of the table."""

    path: str
    """The path, in which `{name}` is a parameter that matches one component."""
    method: Callable[..., PageAnswer]
    """Method of `Viewer` that answers. Its parameters are those of the path and `query`, or fields of the query."""
    query: type[PageQuery] = PageQuery
    names_files: bool = False
    """Whether the answer can say where files lie on the machine, which only keys with scope `admin` may see."""

    @property
    def summary(self) -> str:
        line = (inspect.getdoc(self.method) or "").partition("\n")[0].rstrip(".")
        return line[0].lower() + line[1:]

    @property
    def answer(self) -> type[PageAnswer]:
        answer: type[PageAnswer] = get_type_hints(self.method)["return"]
        return answer

    def read(self, viewer: AnyViewer, asked: Asked) -> PageAnswer:
        """Ask the viewer."""
        values = {name: int(text) if name in NUMBERS else text for name, text in asked.values.items()}
        known = {**asked.query.__dict__, **values, "query": asked.query}
        arguments = {
            name: RolloutKey.model_validate({field: values[field] for field in RolloutKey.model_fields})
            if name == "key"
            else known[name]
            for name in inspect.signature(self.method).parameters
            if name != "self"
        }
        return call_viewer(viewer, self.method.__name__, arguments)

    def asked(self, values: Mapping[str, str], query: Mapping[str, Sequence[str]]) -> Asked:
        """Check parameters and query.

        Raises:
            InvalidRequestError: a parameter is not a name or number, or the query has an unknown or wrong value.
        """
        for param, value in values.items():
            validate_name(value, param=param)
            if param in NUMBERS and not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
                raise InvalidRequestError(f"`{param}` must be a whole number, got {value[:40]!r}", param=param)
        lists = {name for name, field in self.query.model_fields.items() if get_origin(field.annotation) is list}
        values_by_name = {name: list(texts) if name in lists else texts[-1] for name, texts in query.items()}
        try:
            return Asked(values, self.query.model_validate(values_by_name))
        except ValidationError as error:
            raise invalid_request(error) from None


_RUN = "runs/{project}/{name}"
_ROLLOUT = f"{_RUN}/rollouts/{{split}}/{{step}}/{{group}}/{{index}}"


PATHS: list[ReadPath] = [
    ReadPath("runs", Viewer.runs, RunsQuery, names_files=True),
    ReadPath(_RUN, Viewer.run, names_files=True),
    ReadPath(f"{_RUN}/series", Viewer.series, SeriesQuery),
    ReadPath(f"{_RUN}/rollouts", Viewer.rollouts, RolloutTableQuery),
    ReadPath(_ROLLOUT, Viewer.rollout),
    ReadPath(f"{_ROLLOUT}/tokens", Viewer.tokens, TokensQuery),
    ReadPath(f"{_ROLLOUT}/request", Viewer.request, RequestQuery),
    ReadPath(f"{_RUN}/groups/{{split}}/{{step}}/{{group}}", Viewer.group),
    ReadPath(f"{_RUN}/steps/{{step}}", Viewer.step),
    ReadPath(f"{_RUN}/steps/{{step}}/tree", Viewer.tree, TreeQuery),
    ReadPath(f"{_RUN}/ledger", Viewer.ledger, LedgerQuery),
    ReadPath(f"{_RUN}/checkpoints", Viewer.checkpoints),
    ReadPath(f"{_RUN}/checkpoints/compare", Viewer.compare, CompareQuery),
    ReadPath("comparisons", Viewer.comparisons, names_files=True),
    ReadPath("comparisons/{comparison}", Viewer.comparison, names_files=True),
    ReadPath(f"{_RUN}/costs", Viewer.costs),
]
"""All paths. Each is one method of `Viewer`."""


def find_path(text: str) -> tuple[ReadPath, Asked]:
    """Parse a path with its query, e.g. `runs/games/agent/rollouts?step=12`.

    Raises:
        NotFoundError: there is no such path.
        InvalidRequestError: a parameter or the query is wrong.
    """
    path, _, query = text.partition("?")
    parts = [unquote(part) for part in path.strip("/").split("/")]
    for row in PATHS:
        names = row.path.split("/")
        if len(names) != len(parts):
            continue
        pairs = list(zip(names, parts, strict=True))
        if all(name[0] == "{" or name == part for name, part in pairs):
            values = {name[1:-1]: part for name, part in pairs if name[0] == "{"}
            return row, row.asked(values, parse_qs(query))
    known = ", ".join(row.path for row in PATHS)
    raise NotFoundError(f"there is no answer at {path!r}; there are {known}", param="path")


def query_parameters(row: ReadPath) -> dict[str, Any]:
    """Names and types of the parameters that the query of a path may have."""
    return {name: field.annotation for name, field in row.query.model_fields.items()}


class TrainingPage(Page):
    """The page about a data directory, and about the server that runs on it."""

    def __init__(self, server: ServerState, runtime: Runtime | None) -> None:
        super().__init__(server, runtime)
        self.addresses = Addresses(server.config.host, server.config.cors_origins)
        self.sessions = Sessions()
        self._failed_logins = FailedLogins()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="page")

    @functools.cached_property
    def viewer(self) -> AnyViewer:
        """Reader of the data directory, or of those that `art view` has, opened when the first answer needs it.

        Raises:
            NotFoundError: the server was started without a data directory.
        """
        if (folder := self.server.paths.data_dir) is None:
            raise NotFoundError("this server has no data directory to show")
        return Viewer(DataDir(folder), activity=None if self.runtime is None else self.runtime.overview.activity)

    def routes(self) -> list[Route]:
        routes = [
            Route("GET", "/", self.index, scope=None, media=_HTML),
            Route("GET", "/static/{version}/{file}", self.static_file, scope=None, media=_ANY),
            Route("POST", "/view/login", self.login, scope=None, request=LoginRequest, response=PageSession),
            Route("POST", "/view/logout", self.logout, scope=None, request=Empty, response=Empty),
            Route("POST", f"{BASE}{_RUN}/labels", self.label, scope="train", request=LabelChanges, response=RunLabels),
            Route("GET", f"{BASE}session", self.session, scope="infer", response=PageSession),
            *(
                Route(
                    "GET", BASE + row.path, self._handler(row), scope="infer", response=row.answer,
                    query=query_parameters(row),
                )
                for row in PATHS
            ),
        ]  # fmt: skip
        if self.runtime is not None:
            routes += [
                Route("GET", f"{BASE}system", self.system, scope="infer", response=SystemAnswer),
                Route("GET", f"{BASE}live", self.live, scope="infer", media=("text/event-stream",)),
            ]
        own = [dataclasses.replace(route, from_page=True) for route in routes]
        link = Route("POST", "/view/links", self.make_link, scope="infer", request=Empty, response=PageLink)
        return own if self.runtime is None else [*own, link]

    def identify(self, request: Request, route: Route | None) -> Caller | None:
        if route is None and not request.scope["path"].startswith(BASE):
            return None  # a session learns that an address does not exist; without one, unknown routes look like known
        if route is not None and route.scope is None:
            if route.method == "GET":
                self.addresses.check_host(request)  # a link on any other page may lead here
            else:
                self.addresses.check_page_request(request)
        elif texts := read_cookies(request, https=self.addresses.is_https(request)):
            self.addresses.check_page_request(request)
            return self.server.keyring.caller(self.sessions.find(*texts).key_id)
        return None

    def link(self, url: str) -> str:
        """Make a link to the page of the server at an address, which opens once without a key."""
        return f"{url}/{LOGIN_MARK}{self.sessions.make_code(SERVER_KEY_ID)[0]}"

    def greeting(self, url: str) -> str:
        return f"see it learn: {self.link(url)}  (opens once; later: art view {self.server.paths.data_dir})"

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        if "viewer" in self.__dict__:
            self.viewer.close()

    # -- files and login --

    async def index(self, call: ApiCall) -> Response:
        """Show the page. It asks for a key if the browser has no session."""
        page = await asyncio.to_thread(page_files)
        headers = {"cache-control": "no-cache", "etag": f'"{page.version}"'}
        if call.header("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        document = page.document(f"static/{page.version}/")
        return Response(document, headers=headers | {"content-type": CONTENT_TYPES[".html"]})

    async def static_file(self, call: ApiCall) -> Response:
        """Send a file of the page. Its address changes with its content, so browsers may keep it for ever."""
        page = await asyncio.to_thread(page_files)
        name = call.path["file"]
        if call.path["version"] != page.version or name not in page.content:
            raise NotFoundError("there is no such file of the page; reload the page if the server was updated")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        headers["content-type"] = CONTENT_TYPES[name[name.rindex(".") :]]
        if "gzip" in (call.header("accept-encoding") or ""):
            return Response(page.packed[name], headers=headers | {"content-encoding": "gzip"})
        return Response(page.content[name], headers=headers)

    async def login(self, call: ApiCall) -> Response:
        """Open a session of the page, by a key or a one-time code, and set its cookie."""
        request, keyring = await call.body(LoginRequest), self.server.keyring
        address = call.request.client.host if call.request.client else "?"
        self._failed_logins.check(address)
        try:
            if request.key is not None:
                caller = keyring.find(request.key.encode("latin-1", "replace"))
            else:
                caller = keyring.caller(self.sessions.redeem(request.code or ""))
        except AuthenticationError as error:
            self._failed_logins.note(address)
            if request.key is not None and error.message.startswith("the API key is wrong"):
                raise AuthenticationError("this key does not open the page of this server") from None
            raise
        caller.check_scope("infer")  # all that the page shows needs it
        text, _ = self.sessions.open(caller.key_id)
        cookie = make_cookie(call.request, text, https=self.addresses.is_https(call.request))
        body = self._describe(call, caller).model_dump_json().encode()
        return json_response(body, headers={"set-cookie": cookie, "cache-control": "no-store"})

    async def session(self, call: ApiCall) -> PageSession:
        """Return what this session of the page, or this key, may do."""
        return self._describe(call, call.caller)

    def _describe(self, call: ApiCall, caller: Caller) -> PageSession:
        base_url = None if self.runtime is None else f"{call.request.scope['scheme']}://{call.header('host')}/v1"
        return PageSession(
            key_id=caller.key_id, project=caller.project, scopes=sorted(caller.scopes), base_url=base_url,
            has_server=self.runtime is not None, version=art.__version__,
        )  # fmt: skip

    async def logout(self, call: ApiCall) -> Response:
        """End the session, and remove its cookie."""
        await call.body(Empty)
        https = self.addresses.is_https(call.request)
        for text in read_cookies(call.request, https=https):
            self.sessions.close(text)
        return json_response(b"{}", headers={"set-cookie": make_cookie(call.request, "", https=https)})

    async def make_link(self, call: ApiCall) -> PageLink:
        """Make a one-time code that opens the page in a browser, with the rights of the key that asks."""
        await call.body(Empty)
        code, expires_at = self.sessions.make_code(call.caller.key_id)
        return PageLink(code=code, expires_at=expires_at)

    async def label(self, call: ApiCall) -> RunLabels:
        """Replace tags, notes, star or archive mark of a run, and return all of them."""
        changes = await call.body(LabelChanges)
        return await self._read(lambda viewer: viewer.label(call.path["project"], call.path["name"], changes))

    # -- what it shows --

    def _handler(self, row: ReadPath) -> Callable[[ApiCall], Awaitable[Response]]:
        """Make the handler of a row."""

        async def answer(call: ApiCall) -> Response:
            query_string = call.request.scope["query_string"].decode("latin-1")
            asked = row.asked(call.path, parse_qs(query_string))
            if row.query is RunsQuery and call.caller.project is not None:  # the only path that covers several projects
                call.caller.check_project(asked.query.project or call.caller.project)
                asked = row.asked(call.path, {"project": [call.caller.project]})
            elif "project" not in row.path and call.caller.project is not None:
                raise PermissionDeniedError(
                    f"key {call.caller.key_id} is for project {call.caller.project!r}, and comparisons of models can "
                    "have models of several projects",
                    param="project",
                )

            def read(viewer: AnyViewer) -> tuple[str, bytes | None]:
                """Return the tag of the answer, and the answer if the browser does not have it."""
                project = asked.values.get("project") or getattr(asked.query, "project", None)
                version = viewer.version(project, asked.values.get("name"))
                # of the files, of what was asked, and of who asked, since not all see the same
                parts = (version, call.request.scope["path"], query_string, call.caller.key_id)
                etag = f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"'
                is_known = etag == call.header("if-none-match")
                return etag, None if is_known else row.read(viewer, asked).model_dump_json().encode()

            etag, body = await self._read(read)
            headers = {"etag": etag, "cache-control": "private, no-cache", "vary": "cookie, authorization"}
            if body is None:
                return Response(status_code=304, headers=headers)
            body = call.without_paths(body) if row.names_files else body
            if "gzip" in (call.header("accept-encoding") or ""):
                headers |= {"content-encoding": "gzip", "vary": "cookie, authorization, accept-encoding"}
                body = await asyncio.to_thread(gzip.compress, body, 3)
            return json_response(body, headers=headers)

        answer.__doc__ = f"{row.summary[0].upper()}{row.summary[1:]}, for the page."
        return answer

    async def _read(self, ask: Callable[[AnyViewer], T]) -> T:
        """Ask the viewer, in a thread of the page."""
        viewer, context = self.viewer, contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: context.run(ask, viewer))

    # -- what happens now --

    async def system(self, call: ApiCall) -> Response:
        """Return processes, memory, queues, throughput, running jobs and disk of the server."""
        answer = await call.runtime.overview.system(call.caller.project)
        return json_response(call.without_paths(answer.model_dump_json().encode()))

    async def live(self, call: ApiCall) -> EventStream:
        """Stream what agents say while it is sampled, and how training goes on."""
        events = call.runtime.live.watch(call.caller.project)

        def frame(event: LiveEvent) -> bytes:
            shown = event.body if event.data.kind in _SAMPLED else call.without_paths(event.body)
            return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, event.data.kind.encode(), shown)

        async def frames() -> AsyncGenerator[bytes, None]:
            yield f"retry: {RETRY_MS}\n\n".encode()
            async with contextlib.aclosing(events):
                async for batch in events:
                    self.server.keyring.caller(call.caller.key_id)  # raises if the key was revoked: the stream ends
                    yield b"".join(map(frame, batch)) or b": alive\n\n"

        return EventStream(frames(), UNBUFFERED)
