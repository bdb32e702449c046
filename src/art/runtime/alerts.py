"""Alerts: what a person should know about a run leaves the server, by a webhook or a command such as `mail`.

    JobQueue --news--> Alerts --one at a time--> POST to a URL, or a command's standard input

A finding that repeats at each step is sent once, also after a restart: what was sent is in `alerts.jsonl` of the data
directory. An alert that could not be sent is logged, and sent when the finding comes again; training never waits.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from pathlib import Path

import httpx2
from pydantic import BaseModel

from art.protocol.live import FindingMade, JobMoved, LiveData
from art.storage.jsonl import append_lines, read_rows_from

logger = logging.getLogger(__name__)

TIMEOUT_S = 20.0
MOST_WAITING = 1000
"""Alerts that wait to be sent; further ones are logged only."""


class Alert(BaseModel):
    """What is sent. Chats such as Slack and Mattermost show `text`."""

    text: str
    project: str
    name: str
    step: int | None
    finding: str


class Alerts:
    """Sends findings and failed jobs to one address."""

    def __init__(self, address: str, sent: Path) -> None:
        """
        Args:
            address: URL that gets a POST with JSON, or a command line whose standard input gets the text.
            sent: file of what was sent before.
        """
        self._address, self._file = address, sent
        self._waiting: asyncio.Queue[tuple[str, Alert]] = asyncio.Queue(MOST_WAITING)
        self._known: set[str] = set()
        """Keys of alerts that wait or were sent."""

    def take(self, project: str, news: LiveData) -> None:
        """Queue what should be sent of the news; `JobQueue` calls it."""
        if isinstance(news, FindingMade):
            # The part after the first ": " is the same each time a rule is broken.
            self._queue(news.text.partition(": ")[2] or news.text, news.text, news.name, project, news.step)
        elif isinstance(news, JobMoved) and news.state == "failed":
            finding = f"the job {news.job_kind} failed: {news.error}"
            self._queue(finding, finding, news.name, project, None)

    def _queue(self, finding: str, said: str, name: str, project: str, step: int | None) -> None:
        key = f"{project}/{name} {finding}"
        if key in self._known:
            return
        at = "" if step is None else f", step {step}"
        alert = Alert(text=f"{project}/{name}{at}: {said}", project=project, name=name, step=step, finding=said)
        try:
            self._waiting.put_nowait((key, alert))
            self._known.add(key)
        except asyncio.QueueFull:
            logger.warning("too many alerts wait; this one is not sent: %s", alert.text)

    async def run(self) -> None:
        """Send what is queued, until it is cancelled."""
        rows, _ = await asyncio.to_thread(read_rows_from, self._file, 0)
        sent = {str(row.get("key")) for row in rows}
        while True:
            key, alert = await self._waiting.get()
            if key in sent:
                continue
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._send(alert)
                await asyncio.to_thread(append_lines, self._file, [{"key": key, **alert.model_dump()}])
            except Exception as error:  # whatever a URL or a command does, training goes on
                self._known.discard(key)
                logger.warning("an alert was not sent (%s: %s): %s", type(error).__name__, error, alert.text)

    async def _send(self, alert: Alert) -> None:
        if self._address.startswith(("http://", "https://")):
            async with httpx2.AsyncClient(timeout=TIMEOUT_S) as client:
                (await client.post(self._address, json=alert.model_dump())).raise_for_status()
            return
        command = await asyncio.create_subprocess_exec(
            *shlex.split(self._address), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = await command.communicate(f"{alert.text}\n".encode())
        except asyncio.CancelledError:
            command.kill()
            raise
        if command.returncode:
            raise OSError(f"the command ended with {command.returncode}: {errors.decode(errors='replace').strip()}")
