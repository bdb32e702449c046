"""What happens now: the live view, as server-sent events, and the state of the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from art.protocol.live.events import LiveEvent
from art.protocol.live.system import SystemAnswer
from art.server.asgi import EVENT_HEADERS, cancel_on_disconnect
from art.server.call import Call, Route

HEARTBEAT_S = 15.0
"""Longest time without a byte on a stream. Proxies close connections that are silent for a minute."""
RETRY_MS = 1000
_SAMPLED = frozenset({"request_started", "tokens"})
"""Events that hold what models wrote, and nothing of the machine."""


async def system(call: Call) -> SystemAnswer:
    """Return processes, memory, queues, throughput, running jobs and disk of the server."""
    return await call.runtime.overview.system(call.caller.project)


async def live(call: Call) -> None:
    """Stream what agents say while it is sampled, and how training goes on."""
    events = call.runtime.live.watch(call.caller.project)
    async with cancel_on_disconnect(call.scope, call.receive), contextlib.aclosing(with_heartbeats(events)) as beating:
        # Without the last header, a proxy such as nginx holds events back to send many at once.
        headers = [*EVENT_HEADERS, (b"x-accel-buffering", b"no")]
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(call, f"retry: {RETRY_MS}\n\n".encode())
        checked_at = time.monotonic()
        async for batch in beating:
            if time.monotonic() - checked_at > HEARTBEAT_S:
                call.server.keyring.caller(call.caller.key_id)  # raises if the key was revoked: the stream ends
                checked_at = time.monotonic()
            await _send(call, b": alive\n\n" if batch is None else b"".join([_frame(call, event) for event in batch]))
        await call.send({"type": "http.response.body", "body": b""})


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


async def _send(call: Call, body: bytes) -> None:
    await call.send({"type": "http.response.body", "body": body, "more_body": True})


ROUTES = [
    Route("GET", "/view/api/system", system, scope="infer", response=SystemAnswer, from_page=True),
    Route("GET", "/view/api/live", live, scope="infer", media=("text/event-stream",), from_page=True),
]
