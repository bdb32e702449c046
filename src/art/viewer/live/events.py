"""What agents say now, as a stream of events for the live view."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from art.gateway.live.hub import LiveHub
from art.protocol.live.events import LiveEvent


class Streaming(Protocol):
    """The part of a running server that live events come from."""

    @property
    def live(self) -> LiveHub: ...


async def live_events(
    runtime: Streaming, *, project: str | None, after: int | None
) -> AsyncGenerator[list[LiveEvent], None]:
    """Yield live events, some at a time, until the generator is closed.

    It never ends by itself, and yields nothing while nothing happens: send heartbeats meanwhile. A reader that is too
    slow loses events, which the next `Reset` says; nothing else waits for it.

    Args:
        project: only events of this project; `None` for all projects and the server's log.
        after: number of the last event that the viewer has got, to go on from there; `None` for a new viewer.
    """
    async for events in runtime.live.watch(project, after):
        yield events
