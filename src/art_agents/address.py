"""A rollout's address in a container that has no network.

    agent -> 127.0.0.1:8817 in the container -> the socket that is mounted there -> this process -> ART's server

The container sees one socket file. What is sent into it reaches one rollout and, below `/side`, that of its side
requests, and nothing else: this process puts the rollout's path before the one that is asked for, and adds the key. So
no key is in the container, and an agent cannot ask for another rollout, another model's project or the server's other
calls. For that it must read a request as the server does: what could be read in two ways, it refuses; each request has
a connection of its own, a body of the length that was declared, and the headers that a server of models needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from art_agents.containers import owner

PORT = 8817
MOUNT = "/opt/art-address"
_SOCKET = "rollout"
_MAX_HEAD_BYTES = 65536
_ERROR_BYTES = 2000
_MAX_CONNECTIONS = 64
"""Open connections of one container, so that none uses up the open files of this process."""
_FIRST_LINE = re.compile(r"(GET|POST) (/side)?(/v1(?:/[\w-]+)+)(\?[!-~]*)? HTTP/1\.[01]", re.ASCII)
_HEADER = re.compile(r"([\w!#$%&'*+.^`|~-]+):[ \t]*([ -~\t\x80-\xff]*)", re.ASCII)
_KEPT = {"accept", "accept-encoding", "anthropic-beta", "anthropic-version", "content-encoding", "content-type",
         "openai-beta", "user-agent"}  # fmt: skip
"""Headers that are sent on, beside the length."""
_PYTHON = f"""
import socket, threading
def pipe(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError: pass
server = socket.create_server(("127.0.0.1", {PORT}))
while True:
    client, there = server.accept()[0], socket.socket(socket.AF_UNIX)
    there.connect("{MOUNT}/{_SOCKET}")
    for pair in ((client, there), (there, client)): threading.Thread(target=pipe, args=pair, daemon=True).start()
"""
_NODE = f"""
const net = require("net");
net.createServer({{ allowHalfOpen: true }}, (client) => {{
  const there = net.connect({{ path: "{MOUNT}/{_SOCKET}", allowHalfOpen: true }});
  for (const end of [client, there]) end.on("error", () => {{ client.destroy(); there.destroy(); }});
  client.pipe(there); there.pipe(client);
}}).listen({PORT}, "127.0.0.1");
"""


def forwarder(prefix: str) -> str:
    """A script for bash that listens in the container, in the background, and waits until it does. It needs Python or
    Node.js, of the agent or of the image."""
    return f"""
for python in {prefix}/bin/python python3; do
  command -v $python >/dev/null && {{ $python -c '{_PYTHON}' >/dev/null 2>&1 & break; }}
done
[ -n "$!" ] || {{ node -e '{_NODE}' >/dev/null 2>&1 & }}
for try in $(seq 200); do (exec 3<>/dev/tcp/127.0.0.1/{PORT}) 2>/dev/null && break; sleep 0.05; done
"""


@dataclass(slots=True)
class Address:
    """An open address."""

    folder: Path
    """What the container mounts at `MOUNT`."""
    num_answers: int = 0
    """Answers of the model."""
    last_error: str | None = None
    """Status and body of the newest answer of the server that is an error."""
    is_broken: bool = False
    """Whether the server, when it was asked last, was gone or had an error of its own."""
    used_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when more was asked after the last answer that is allowed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{PORT}"

    @property
    def side_url(self) -> str:
        """Leads to the rollout of side requests."""
        return f"{self.url}/side"


@contextlib.asynccontextmanager
async def open_address(
    base_url: str, api_key: str, max_answers: int, *, side_url: str | None = None
) -> AsyncIterator[Address]:
    """Open an address that leads to one rollout, and to another one for what an agent asks besides.

    Args:
        base_url: the rollout's base URL at the server, with `/v1`.
        api_key: the server's key. It stays in this process.
        max_answers: answers of the model after which nothing more is asked.
        side_url: base URL of the rollout for side requests; by default they belong to the same one.
    """
    with tempfile.TemporaryDirectory(prefix=f"art-address-{owner()}-") as private:
        folder = Path(private, "mounted")  # the folder above keeps other users of this machine out
        os.mkdir(folder)
        address = Address(folder)
        relay = _Relay(base_url, side_url or base_url, api_key, max_answers, address)
        server = await asyncio.start_unix_server(relay.serve, folder / _SOCKET, limit=_MAX_HEAD_BYTES)
        os.chmod(folder / _SOCKET, 0o666)
        try:
            yield address
        finally:
            server.close()
            for task in relay.open:
                task.cancel()
            await asyncio.gather(*relay.open, return_exceptions=True)


class _Relay:
    """Sends the requests of one container on. Each has a connection of its own, so that every head is read."""

    def __init__(self, base_url: str, side_url: str, api_key: str, max_answers: int, address: Address) -> None:
        self._key, self._max_answers, self._address = api_key, max_answers, address
        self._there, self._side = (urlsplit(url.removesuffix("/v1")) for url in (base_url, side_url))
        self._tls = ssl.create_default_context() if self._there.scheme == "https" else None
        self._num_awaited = 0
        """Answers of the model that have not begun."""
        self.open: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            if len(self.open) <= _MAX_CONNECTIONS:
                await self._send_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # one side has hung up, or sends no HTTP; or the address closes
        finally:
            self.open.discard(task)
            writer.close()

    async def _send_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        request, headers = _FIRST_LINE.fullmatch(first), [_HEADER.fullmatch(line) for line in lines]
        by_name = {header[1].lower(): header[2].strip() for header in headers if header}
        length = by_name.get("content-length", "0")
        num_lengths = sum(header[1].lower() == "content-length" for header in headers if header)
        if request is None or None in headers or num_lengths > 1 or not re.fullmatch("[0-9]{1,12}", length):
            writer.write(_answer("400 Bad Request", "expected one request of HTTP/1.1, GET or POST, for a path in /v1"))
            return
        if "transfer-encoding" in by_name:
            writer.write(_answer("411 Length Required", "expected a content-length"))
            return
        method, side, path, query = request.groups("")
        asks_model = method == "POST" and not path.endswith("/count_tokens")
        if asks_model and self._address.num_answers + self._num_awaited >= self._max_answers:
            if not self._num_awaited:
                self._address.used_up.set()
            writer.write(_answer("403 Forbidden", f"the rollout has used up its {self._max_answers} answers"))
            return
        rollout = (self._side if side else self._there).path
        head = [
            f"{method} {rollout}{path}{query} HTTP/1.1", f"Host: {self._there.netloc}", "Connection: close",
            f"Authorization: Bearer {self._key}", f"Content-Length: {length}",
            *(f"{name}: {value}" for name, value in by_name.items() if name in _KEPT),
        ]  # fmt: skip
        port = self._there.port or (80 if self._tls is None else 443)
        self._count(asks_model)
        with contextlib.ExitStack() as at_end:
            awaited = at_end.enter_context(contextlib.ExitStack())
            awaited.callback(self._count, -asks_model)
            try:
                answer, asking = await asyncio.open_connection(self._there.hostname, port, ssl=self._tls)
                at_end.callback(asking.close)
                asking.write("\r\n".join([*head, "", ""]).encode("latin-1"))
                at_end.callback(asyncio.create_task(_pipe(reader, asking, int(length))).cancel)
                begun = await answer.readuntil(b"\r\n\r\n")
            except (OSError, asyncio.IncompleteReadError) as error:
                self._address.is_broken, self._address.last_error = True, f"the server is gone: {error}"
                writer.write(_answer("503 Service Unavailable", "ART's server is gone; ask again"))
                return
            writer.write(begun)
            status = begun.split(b" ", 2)[1]
            self._address.is_broken = status >= b"500"
            if status >= b"400":
                body = await answer.read(_ERROR_BYTES)
                writer.write(body)
                self._address.last_error = (begun.partition(b"\r\n")[0] + b" " + body).decode(errors="replace")
            elif asks_model:
                self._address.num_answers += 1
            awaited.close()
            # It ends with the answer, as the connection does. One in pieces that lacks the last piece is cut off.
            end, is_in_pieces = await _pipe(answer, writer), b"transfer-encoding: chunked" in begun.lower()
            self._address.is_broken |= is_in_pieces and answer.at_eof() and not end.endswith(b"0\r\n\r\n")

    def _count(self, number: int) -> None:
        self._num_awaited += number


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: float = math.inf) -> bytes:
    """Send on what comes, up to a length. Returns the last bytes of it."""
    end = b""
    with contextlib.suppress(ConnectionError):
        while length > 0 and (data := await reader.read(int(min(length, 65536)))):
            length -= len(data)
            end = (end + data)[-16:]
            writer.write(data)
            await writer.drain()
    return end


def _answer(status: str, message: str) -> bytes:
    body = f'{{"error": {{"message": "{message}"}}}}'
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()
