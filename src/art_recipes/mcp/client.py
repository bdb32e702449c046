"""A connection to one MCP server over the official SDK: its tools, its resources, and calls with time limits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import shlex
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from art.config.base import check_no_userinfo
from art.errors import ConfigError, ToolServerError
from art.trajectory import cancel_and_wait
from art_recipes.mcp.types import MCPResource, MCPTool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.server.mcpserver import MCPServer

T = TypeVar("T")

INSTALL = "pip install 'agent-reinforcement-trainer[mcp]'"
MAX_PAGES = 100
"""Most pages of a list of tools or resources. A server whose list is longer is refused."""
_CLOSE_TIMEOUT_S = 10.0
"""Seconds to close a connection, and for a command to end by itself."""
_STDERR_BYTES = 2000
"""Length of the end of a server's standard error in the message that it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call of an MCP tool, as one text that an agent can read."""

    text: str
    is_error: bool = False


_statuses: ContextVar[list[int] | None] = ContextVar("_statuses", default=None)
"""HTTP error statuses of one request. The SDK does not report them, but it sends in the context of its caller."""
_NOT_THE_TOOL = frozenset({401, 403, 408, 429})
"""HTTP statuses of a refused key or a rate limit. Like those from 500 on, they say nothing about the tool."""


def is_address(server: str | Sequence[str]) -> bool:
    """Whether `server` is an HTTP address, and not a command that starts a server."""
    return isinstance(server, str) and server.startswith(("http://", "https://"))


class MCPClient:
    """A connection to an MCP server (Model Context Protocol), which offers tools and resources to agents.

    Example:
        async with MCPClient("http://127.0.0.1:8000/mcp", headers={"Authorization": "Bearer ..."}) as client:
            tools = await client.list_tools()
            result = await client.call_tool("search", {"text": "opal"})

    Tasks may share a client; their calls run at the same time.
    """

    def __init__(
        self,
        server: str | Sequence[str] | MCPServer,
        *,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        connect_timeout_s: float = 30.0,
        call_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            server: address of a server (streamable HTTP), or a command that starts one (stdio), as a line or a list;
                or a server object of the SDK, which then runs in this process.
            headers: headers of every HTTP request, e.g. for keys.
            env: environment variables of a command, beside PATH, HOME and the like. It gets no others, so that keys of
                this process do not reach it.
            connect_timeout_s: seconds to start or reach the server, and to list its tools and resources.
            call_timeout_s: seconds for one call.
        """
        self._object: MCPServer | None = None
        if not isinstance(server, (str, Sequence)):
            self._object, server = server, [f"<server object {server.name}>"]
        self._is_http = is_address(server)
        self._command = [] if is_address(server) else shlex.split(server) if isinstance(server, str) else list(server)
        self.address = server if isinstance(server, str) else shlex.join(server)
        if not self._is_http and not self._command:
            raise ConfigError("an MCP server is an http:// or https:// address or a command; got nothing")
        if (headers and not self._is_http) or (env and (self._is_http or self._object is not None)):
            raise ConfigError(f"`headers` are for HTTP addresses and `env` for commands, not for {self.address!r}")
        if isinstance(server, str) and is_address(server):
            check_no_userinfo(server, "server")
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                raise ConfigError(  # without the value, which may be a key
                    f"the value of the header {name!r} cannot be sent: expected printable ASCII on one line, without "
                    "spaces at its ends"
                )
        if connect_timeout_s <= 0 or call_timeout_s <= 0:
            raise ConfigError(f"time limits must be above 0, got {connect_timeout_s=} and {call_timeout_s=}")
        self._headers, self._env = dict(headers or {}), dict(env or {})
        self._connect_timeout_s, self._call_timeout_s = connect_timeout_s, call_timeout_s
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stderr: Path | None = None
        """File that gets the standard error of a command."""
        self._log = ""
        """The end of a command's standard error, once the command has ended."""

    # -- the connection --

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConfigError: the SDK is not installed, or the client is connected already.
            ToolServerError: the server cannot be started or reached, or it does not speak MCP.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"a client of MCP servers needs the official SDK: {INSTALL}")
        if self._holder is not None:
            raise ConfigError(
                f"this client of {self.address} is connected already; make another for a second connection"
            )
        # The first import takes about a second: do it in a thread, before the time limit of the connection.
        await asyncio.to_thread(importlib.import_module, "mcp")
        self._stop.clear()
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holder, statuses = _start(self._hold(ready))
        try:
            either: set[asyncio.Future[Any]] = {ready, self._holder}
            await asyncio.wait(either, timeout=self._connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                what = self._ending() or f"no connection within {self._connect_timeout_s:g} s"
                raise self._gone(what, _not_the_tool(statuses))
        except BaseException:
            await self._close(timeout_s=0.0)
            raise
        self._client = ready.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close(timeout_s=_CLOSE_TIMEOUT_S)

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        """Keep the connection open. The SDK requires that one task opens and closes it; callers are other tasks."""
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            transport = await stack.enter_async_context(self._transport())
            # No cache: the client lists tools to find out whether the server is alive.
            client = await stack.enter_async_context(Client(transport, cache=None))
            ready.set_result(client)
            await self._stop.wait()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self._object is not None:
            yield self._object
            return
        if self._is_http:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            # Every wait here has its own limit, and a server may keep its stream open for any time.
            hooks = {"response": [_note_status]}
            async with httpx2.AsyncClient(headers=self._headers, timeout=None, event_hooks=hooks) as http:
                yield streamable_http_client(self.address, http_client=http)
            return
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *args = self._command
        with tempfile.TemporaryDirectory(prefix="art-mcp-", ignore_cleanup_errors=True) as folder:
            self._stderr = Path(folder, "stderr.txt")
            parameters = StdioServerParameters(command=program, args=args, env=self._env)
            try:
                with self._stderr.open("w", encoding="utf-8") as errlog:
                    yield stdio_client(parameters, errlog=errlog)
            finally:
                self._log = self._read_log()

    async def _close(self, *, timeout_s: float) -> None:
        self._client = None
        self._stop.set()
        holder, self._holder = self._holder, None
        if holder is None:
            return
        try:
            if timeout_s:
                await asyncio.wait({holder}, timeout=timeout_s)
        finally:
            await cancel_and_wait([holder])  # errors of a connection that is closed anyway do not matter

    # -- what the server offers --

    async def list_tools(self) -> list[MCPTool]:
        """All tools of the server.

        Raises:
            ToolServerError: the server gave no list.
        """
        items = await self._list("list_tools", "tools")
        return [MCPTool(item.name, item.description or "", dict(item.input_schema)) for item in items]

    async def list_resources(self) -> list[MCPResource]:
        """All resources of the server; empty if it has none."""
        if self._connected().server_capabilities.resources is None:
            return []
        items = await self._list("list_resources", "resources")
        return [MCPResource(str(item.uri), item.name, item.description or "", item.mime_type) for item in items]

    async def _list(self, method: str, attribute: str, *, when: str = "") -> list[Any]:
        items: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await self._ask(getattr(self._connected(), method)(cursor=cursor), self._connect_timeout_s)
            except ToolServerError:
                raise
            except Exception as error:
                raise self._gone(f"{when}it gave no list of its {attribute}: {_describe(error)}") from error
            items += getattr(page, attribute)
            cursor = page.next_cursor
            if cursor is None:
                return items
        raise self._gone(f"its list of {attribute} has more than {MAX_PAGES} pages")

    # -- calls --

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Its errors and time-outs are results with a text that an agent can read.

        Raises:
            ToolServerError: the server is gone or no longer answers. The policy is not to blame, so it gets no reward.
        """
        try:
            result = await self._ask(self._connected().call_tool(name, dict(arguments)), self._call_timeout_s)
        except ToolServerError:
            raise
        except TimeoutError:
            await self._check_alive(name)
            return ToolResult(text=f"{name} gave no answer within {self._call_timeout_s:g} s", is_error=True)
        except Exception as error:  # the protocol or connection failed, or the answer breaks the tool's schema
            await self._check_alive(name)
            return ToolResult(text=f"{name} failed: {_describe(error)}", is_error=True)
        return ToolResult(text=_as_text(result), is_error=bool(result.is_error))

    async def _ask(self, request: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Wait for the answer to a request.

        Raises:
            TimeoutError: there is no answer in time.
            ToolServerError: the connection ended, or the server refused the request.
        """
        assert self._holder is not None
        call, statuses = _start(request)
        try:
            await asyncio.wait({call, self._holder}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and call.exception() is not None and (bad := _not_the_tool(statuses)):
                raise self._gone("it refused a request", bad)
            if call.done():
                return call.result()
            if self._holder.done():
                raise self._gone(self._ending() or "the connection ended")
            raise TimeoutError
        finally:
            await cancel_and_wait([call])

    async def _check_alive(self, tool: str) -> None:
        """Raise unless the server still answers: only then is a failed call the tool's own fault."""
        await self._list("list_tools", "tools", when=f"after a call of {tool} failed, ")

    def _connected(self) -> Client:
        if self._client is None:
            raise ToolServerError(f"the MCP server {self.address} is not connected; use `async with MCPClient(...)`")
        return self._client

    # -- errors --

    def _ending(self) -> str | None:
        """The error that ended the connection, if one did."""
        holder = self._holder
        error = holder.exception() if holder is not None and holder.done() and not holder.cancelled() else None
        return None if error is None else _describe(error)

    def _gone(self, what: str, status: int | None = None) -> ToolServerError:
        answered = f" with HTTP status {status}" if status is not None else ""
        hint = "; does it want a key? Pass it in `headers`" if status in (401, 403) else ""
        log = self._read_log() or self._log
        said = f"; the end of its log:\n{log}" if log else ""
        return ToolServerError(f"the MCP server {self.address} failed: {what}{answered}{hint}{said}")

    def _read_log(self) -> str:
        if self._stderr is None or not self._stderr.exists():
            return ""
        with self._stderr.open("rb") as file:
            file.seek(max(0, self._stderr.stat().st_size - _STDERR_BYTES))
            return file.read().decode(errors="replace").strip()


def _start(request: Coroutine[Any, Any, T]) -> tuple[asyncio.Task[T], list[int]]:
    """Start a task, with a list that its HTTP error statuses go to."""
    statuses: list[int] = []
    context = copy_context()
    context.run(_statuses.set, statuses)
    return asyncio.get_running_loop().create_task(request, context=context), statuses


async def _note_status(response: Any) -> None:
    noted = _statuses.get()
    if noted is not None and response.status_code >= 400:
        noted.append(response.status_code)


def _not_the_tool(statuses: list[int]) -> int | None:
    return next((status for status in statuses if status in _NOT_THE_TOOL or status >= 500), None)


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or ("no answer in time" if isinstance(error, TimeoutError) else "no message")
    return f"{type(error).__name__}: {text[:500]}"


def _as_text(result: Any) -> str:
    """The parts of a result as one text. Parts without text appear as their kind."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "resource_link":
            parts.append(f"[resource {block.uri}]")
        else:
            parts.append(f"[{block.type} {getattr(block, 'mime_type', None) or ''}]".replace(" ]", "]"))
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
