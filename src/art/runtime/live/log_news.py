"""Lines of the server's log, for those who watch all projects."""

from __future__ import annotations

import asyncio
import logging

from art.gateway.live.hub import LiveHub
from art.protocol.live.events import LogLine

MAX_LINES_PER_S = 20
"""More lines of one second are counted and left out."""
MAX_CHARS = 2000
LOGGER = "art"


class LiveLog(logging.Handler):
    """Sends the log of this process to a hub while somebody watches. Any thread may log."""

    def __init__(self, hub: LiveHub) -> None:
        super().__init__(logging.INFO)
        self._hub = hub
        self._loop: asyncio.AbstractEventLoop | None = None
        self._second = 0
        self._num_sent = self._num_left_out = 0

    def watch(self, is_watched: bool) -> None:
        """Begin or end to listen. For the hub's `on_watched`."""
        logger = logging.getLogger(LOGGER)
        if is_watched:
            self._loop = asyncio.get_running_loop()
            logger.addHandler(self)
        else:
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if self._second != int(record.created):
            self._second, self._num_sent = int(record.created), 0
        if self._num_sent >= MAX_LINES_PER_S:
            self._num_left_out += 1
            return
        self._num_sent += 1
        line = LogLine(
            level=record.levelname, logger=record.name, text=record.getMessage()[:MAX_CHARS],
            num_left_out=self._num_left_out,
        )  # fmt: skip
        self._num_left_out = 0
        self._loop.call_soon_threadsafe(self._hub.publish, None, line)
