"""Work for a request ends when its client hangs up."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.server import ServerState

from art.config import LimitsConfig
from art.server.answers import cancel_on_disconnect

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


async def test_a_client_that_hangs_up_ends_the_work() -> None:
    outcomes: list[str] = []
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            async with cancel_on_disconnect(Request(scope, receive)):
                begun.set()
                await asyncio.sleep(30)
        except ClientDisconnect:
            outcomes.append("left")

    protocol, transport = await connect(app)
    protocol.data_received(POST % b"")
    await begun.wait()
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
            async with cancel_on_disconnect(Request(scope, receive)):
                await asyncio.sleep(30)
        except ClientDisconnect:
            outcomes.append("left")

    protocol, transport = await connect(app)
    protocol.data_received(POST % b"")
    await arrived.wait()
    transport.closing = True
    protocol.connection_lost(None)
    go_on.set()
    await until(lambda: outcomes)
