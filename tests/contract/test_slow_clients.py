"""Clients that are slow, or leave in the middle, over real sockets: each connection ends, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import uvicorn

from art.config import ServerConfig
from art.gateway.completion import ChatStream
from art.server.app import App
from art.server.connections import MAX_HEADER_BYTES, Connection

READ_S = 1.0
END_WITHIN_S = 60.0
"""How long a connection may go on that should have ended, before the test fails."""
CONFIG = ServerConfig(max_body_bytes=1 << 20)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"


class Impatient(Connection):
    read_timeout_s = write_timeout_s = READ_S


class Gateway:
    def __init__(self) -> None:
        self.num_left = 0

    async def stream(self, request: Any, **how: Any) -> Any:
        async def events() -> Any:
            try:
                while True:
                    yield {"text": "x" * 100_000}
            finally:
                self.num_left += 1

        return ChatStream(num_prompt_tokens=1, chunks=events())


class Runtime:
    def __init__(self) -> None:
        self.gateway = Gateway()

    async def health(self) -> dict[str, Any]:
        return {"status": "ok"}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, Runtime]]:
    runtime = Runtime()
    monkeypatch.setattr("art.server.body.READ_TIMEOUT_S", READ_S)
    app = App(runtime, api_key="k", config=CONFIG)  # type: ignore[arg-type]
    settings = uvicorn.Config(app, log_level="error", lifespan="off", http=Impatient, ws="none")
    server = uvicorn.Server(settings)
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield sock.getsockname()[1], runtime
    server.should_exit = True
    await task


async def send(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, float, int]:
    """What comes back until the server closes the connection, after how long it does, and how many pieces were sent."""
    num_sent = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()

    async def write() -> None:
        nonlocal num_sent
        for piece in pieces:
            writer.write(piece)
            num_sent += 1
            await asyncio.sleep(pause_s)

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(END_WITHIN_S):
            answer = b""
            while data := await reader.read(65536):
                answer += data
    except ConnectionError:
        pass
    finally:
        writing.cancel()
        writer.close()
    return answer, time.monotonic() - started, num_sent


async def alive(port: int) -> bool:
    answer, _, _ = await send(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200")


async def test_slow_headers(server: tuple[int, Runtime]) -> None:
    port, _ = server
    get, headers = b"GET /health HTTP/1.1\r\n", [b"X-A: b\r\n"] * 100  # one each 50 ms
    clients = {
        "nothing": [],
        "a letter": [b"G"],
        "half": [get + b"X-A: b\r\n"],
        "a header at a time": [get, *headers],
        "a second request": [get + b"Host: x\r\n\r\n" + get, *headers],
    }
    ends = await asyncio.gather(*(send(port, *pieces, pause_s=0.05) for pieces in clients.values()))
    for name, (_, took_s, num_sent) in zip(clients, ends, strict=True):
        assert took_s > READ_S * 0.9, name
        assert num_sent < 90, f"{name}: the end comes long before all headers have"
    assert await alive(port)


async def test_slow_bodies(server: tuple[int, Runtime]) -> None:
    port, _ = server
    refused = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    clients = {
        "with a length": (b"408", [HEAD + b"Content-Length: 100000\r\n\r\n", *[b" "] * 200]),
        "in parts": (b"408", [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 200]),
        "of a refused request": (b"401", [refused, *[b" "] * 200]),
    }
    ends = await asyncio.gather(*(send(port, *pieces, pause_s=0.05) for _, pieces in clients.values()))
    for (name, (status, _)), (answer, _, num_sent) in zip(clients.items(), ends, strict=True):
        assert answer.startswith(b"HTTP/1.1 " + status), (name, answer)
        assert num_sent < 190, name
    assert await alive(port)


async def test_an_endless_body_is_refused_and_not_read_on(server: tuple[int, Runtime]) -> None:
    port, _ = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    num_sent, part = 0, b"100000\r\n%b\r\n" % (b" " * 2**20)
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(END_WITHIN_S):
            while True:
                writer.write(part)
                await writer.drain()
                num_sent += 1
    assert num_sent < 128, "MiB, with what the system holds on the way"
    assert (await answer).startswith(b"HTTP/1.1 413")
    writer.close()
    assert await alive(port)


async def test_a_client_that_sends_too_much_reads_why(server: tuple[int, Runtime]) -> None:
    port, _ = server
    async with httpx2.AsyncClient(verify=False) as client:
        for size in (2, 5, 40):
            url, key = f"http://127.0.0.1:{port}/v1/chat/completions", {"authorization": "Bearer k"}
            answer = await client.post(url, content=b" " * (size * 2**20), headers=key)
            assert (answer.status_code, "larger than 1048576 bytes" in answer.text) == (413, True)


async def test_a_large_body_gets_the_time_that_it_needs(server: tuple[int, Runtime]) -> None:
    port, _ = server
    part = b" " * 65536
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (16 * len(part))
    answer, took_s, _ = await send(port, head + part, *[part] * 15, pause_s=0.1)  # each part gives it four seconds more
    assert took_s > READ_S
    assert answer.startswith(b"HTTP/1.1 400")  # it was read; it is no JSON


async def test_truncated_requests(server: tuple[int, Runtime]) -> None:
    port, _ = server
    for pieces in (HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(pieces)
        await writer.drain()
        writer.close()
    assert await alive(port)


async def test_broken_requests(server: tuple[int, Runtime]) -> None:
    port, _ = server
    requests = [
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"401"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\x00: x\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", b"413"),
        (b"GET /health HTTP/1.1\r\nConnection: close, upgrade\r\nUpgrade: websocket\r\n\r\n", b"200"),
    ]
    for request, status in requests:
        answer, _, _ = await send(port, request)
        assert answer.split(b" ")[1] == status, (request, answer)
        assert await alive(port)


async def test_large_headers(server: tuple[int, Runtime]) -> None:
    port, _ = server
    requests = {
        "one": b"/health HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEADER_BYTES,
        "many": b"/health HTTP/1.1" + b"\r\nX: y" * MAX_HEADER_BYTES,
        "address": b"/" + b"a" * 2 * MAX_HEADER_BYTES + b" HTTP/1.1",
    }
    for what, request in requests.items():
        answer, _, _ = await send(port, b"GET " + request + b"\r\n\r\n")
        assert answer == b"" or answer.split(b" ")[1] == b"400", what  # or cut off while it was still sending
        assert await alive(port)


async def test_a_client_that_does_not_read(server: tuple[int, Runtime]) -> None:
    port, runtime = server
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(END_WITHIN_S):
        while not runtime.gateway.num_left:  # until the engine is free again
            await asyncio.sleep(0.05)
    assert runtime.gateway.num_left == 1
    writer.close()
    assert await alive(port)
