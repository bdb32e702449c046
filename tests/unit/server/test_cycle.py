"""A request on a connection of `art-server`: few writes, a client that leaves, headers of a proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from art.config import LimitsConfig
from art.server.asgi import ClientDisconnected, cancel_on_disconnect, connection_of, send_bytes

POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n%b\r\n{}"


class Transport:
    """The server's end of a TCP connection."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 4000) if name in ("peername", "sockname") else None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def connect(app: Any) -> tuple[Any, Transport]:
    from art.server.connections import connections

    config = uvicorn.Config(app, log_config=None, lifespan="off", http=connections(LimitsConfig()), ws="none")
    config.load()
    protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg,operator]
    transport: Any = Transport()
    protocol.connection_made(transport)
    return protocol, transport


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
async def test_a_whole_answer_is_written_at_once(method: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send_bytes(send, 200, b'{"a":1}')

    protocol, transport = await connect(app)
    for number in (1, 2):  # on the same connection
        protocol.data_received((POST % b"").replace(b"POST", method))
        await until(lambda: protocol.cycle.response_complete)
        assert len(transport.writes) == number
        head, _, body = transport.writes[-1].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-length: 7" in head
        assert body == (b'{"a":1}' if method == b"POST" else b"")
    assert not transport.closing
    protocol.data_received((POST % b"connection: close\r\n").replace(b"POST", method))
    await until(lambda: transport.closing)
    assert len(transport.writes) == 3


async def test_the_head_of_a_stream_does_not_wait() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"late"})

    protocol, transport = await connect(app)
    protocol.data_received(POST % b"")
    await until(lambda: transport.writes)
    assert transport.writes[0].endswith(b"transfer-encoding: chunked\r\n\r\n")
    go_on.set()
    await until(lambda: protocol.cycle.response_complete)
    assert b"".join(transport.writes[1:]) == b"4\r\nlate\r\n0\r\n\r\n"


async def test_a_client_that_hangs_up_ends_the_work_without_a_task_that_waits_for_it() -> None:
    outcomes: list[str] = []
    tasks: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            async with cancel_on_disconnect(scope, receive):
                tasks.append(len(asyncio.all_tasks()))
                await asyncio.sleep(30)
        except ClientDisconnected:
            outcomes.append("left")

    protocol, transport = await connect(app)
    before = len(asyncio.all_tasks())
    protocol.data_received(POST % b"")
    await until(lambda: tasks)
    assert tasks == [before + 1]
    transport.closing = True
    protocol.connection_lost(None)
    await until(lambda: outcomes)
    assert outcomes == ["left"]


async def test_a_client_that_has_left_already_is_noticed() -> None:
    outcomes: list[str] = []
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        arrived.set()
        await go_on.wait()
        try:
            async with cancel_on_disconnect(scope, receive):
                await asyncio.sleep(30)
        except ClientDisconnected:
            outcomes.append("left")

    protocol, transport = await connect(app)
    protocol.data_received(POST % b"")
    await arrived.wait()
    transport.closing = True
    protocol.connection_lost(None)
    go_on.set()
    await until(lambda: outcomes)


async def test_a_body_is_known_to_be_here_once_it_is() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection = connection_of(scope)
        assert connection is not None
        seen.append(connection.has_whole_body)
        while (await receive()).get("more_body"):
            pass
        seen.append(connection.has_whole_body)
        await send_bytes(send, 200, b"")

    protocol, _ = await connect(app)
    request = POST % b""
    protocol.data_received(request[:-1])
    await until(lambda: seen)
    protocol.data_received(request[-1:])
    await until(lambda: protocol.cycle.response_complete)
    assert seen == [False, True]


@pytest.mark.parametrize(("headers", "scheme"), [(b"", "http"), (b"X-Forwarded-Proto: https\r\n", "https")])
async def test_headers_of_a_proxy_are_read_where_there_are_any(headers: bytes, scheme: str) -> None:
    schemes: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        schemes.append(scope["scheme"])
        await send_bytes(send, 200, b"")

    protocol, _ = await connect(app)
    for sent, expected in ((headers, scheme), (b"", "http")):  # one request says nothing about the next
        protocol.data_received(POST % sent)
        await until(lambda: protocol.cycle.response_complete)
        assert schemes[-1] == expected
