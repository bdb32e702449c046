"""Clients of a chat server that cost as little as possible: plain sockets, one keep-alive connection each.

A thousand of them run in one process beside the server that they measure, so no HTTP library stands between.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

REQUEST_DEADLINE_S = 120.0
"""An answer that takes longer counts as a hang."""
_LARGEST_PART = 2**22
"""Of an answer, in bytes."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    """Without the marks of chunks."""
    first_s: float
    """From the request to the first bytes of the body."""
    whole_s: float
    retry_after_s: float | None = None

    @property
    def fault(self) -> str | None:
        """What is wrong with it, `None` for a whole answer or a plea to come again."""
        if self.status == 429:
            return None if self.retry_after_s is not None else "429 without Retry-After"
        if self.status != 200:
            return f"status {self.status}: {self.body[:200].decode(errors='replace')}"
        if b"data: [DONE]" not in self.body:
            return "the stream was not finished"
        return "an error inside the stream" if b'"error"' in self.body else None


@dataclass(slots=True)
class Tally:
    """What became of many requests."""

    answered: list[Answer] = field(default_factory=list)
    num_refused: int = 0
    """Answered with 429."""
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        if (fault := answer.fault) is not None:
            self.faults[fault] += 1
        elif answer.status == 429:
            self.num_refused += 1
        else:
            self.answered.append(answer)


class Connection:
    """One at a time; `request` opens it anew where the server has closed it."""

    def __init__(self, host: str, port: int, api_key: str) -> None:
        self._address = (host, port)
        self._head = f"host: {host}:{port}\r\nauthorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """POST `body`, or GET.

        Raises:
            OSError, EOFError, TimeoutError: no whole answer.
        """
        async with asyncio.timeout(REQUEST_DEADLINE_S):
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=_LARGEST_PART)
            assert self._reader is not None
            content = b"" if body is None else json.dumps(body).encode()
            method = "GET" if body is None else "POST"
            head = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(content)}\r\n\r\n"
            sent = time.perf_counter()
            self._writer.write(head.encode() + content)
            return await self._read(self._reader, sent)

    async def _read(self, reader: asyncio.StreamReader, sent: float) -> Answer:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        parts: list[bytes] = []
        first_s = 0.0
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
                first_s = first_s or time.perf_counter() - sent
            await reader.readexactly(2)
        else:
            parts.append(await reader.readexactly(int(headers.get("content-length", 0))))
            first_s = time.perf_counter() - sent
        after = headers.get("retry-after")
        if headers.get("connection") == "close":
            self.close()
        return Answer(
            int(lines[0].split()[1]), b"".join(parts), first_s, time.perf_counter() - sent,
            None if after is None else float(after),
        )  # fmt: skip

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def stream_for(
    connection: Connection, make_body: Any, tally: Tally, *, until: float, longest_pause_s: float = 5.0
) -> None:
    """One request after the other on `connection` until the monotonic time `until`; those under way are finished."""
    while time.monotonic() < until:
        try:
            answer = await connection.request("/v1/chat/completions", make_body())
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            tally.faults[f"{type(error).__name__}: {error}"[:200]] += 1
            connection.close()
            await asyncio.sleep(0.1)
            continue
        tally.add(answer)
        if answer.retry_after_s is not None:
            await asyncio.sleep(min(answer.retry_after_s, longest_pause_s))
