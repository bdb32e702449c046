"""The server's log as live events."""

from __future__ import annotations

import asyncio
import logging

from art.gateway.live import LiveHub
from art.runtime.live import MAX_LINES_PER_S, LiveLog


async def test_lines_reach_those_who_watch_all_projects_and_floods_are_counted() -> None:
    hub = LiveHub()
    log = LiveLog(hub, asyncio.get_running_loop())

    def say(i: int, at: float) -> None:
        fields = {"levelno": logging.INFO, "levelname": "INFO", "msg": "line %d", "args": (i,), "created": at}
        log.handle(logging.makeLogRecord({"name": "art.somewhere", **fields}))

    say(-1, 99.0)  # nobody watches
    stream, of_project = hub.watch(None), hub.watch("p")
    async with asyncio.timeout(60):
        await anext(stream)
        await anext(of_project)
        for i in range(MAX_LINES_PER_S + 6):
            await asyncio.to_thread(say, i, 101.0 if i == MAX_LINES_PER_S + 5 else 100.0)
        events = []
        while len(events) <= MAX_LINES_PER_S:
            events += [event.data for event in await anext(stream)]
    assert [event.text for event in events[:2]] == ["line 0", "line 1"]
    assert (events[-1].text, events[-1].num_left_out) == (f"line {MAX_LINES_PER_S + 5}", 5)
    assert (events[0].level, events[0].logger) == ("INFO", "art.somewhere")
    waiting = asyncio.ensure_future(anext(of_project))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
