"""What is being sampled now, for people who watch.

    gateway --start, sampled, end--> LiveHub --> a list of events for each viewer --watch--> viewers
    jobs, log --publish-------------->

Nobody watches: a request costs a small object, and nothing is kept but the newest ended requests. Somebody watches:
everything that happens within `FLUSH_S` goes out together, and the tokens of all requests of a project as one event. A
viewer that reads too slowly loses its events and starts over from what runs now. It delays nobody.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from art.engine import Timings
from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.live.events import (
    LAST_TEXT_CHARS,
    LiveData,
    LiveEvent,
    Piece,
    RequestEnded,
    RequestStarted,
    Reset,
    Tokens,
)

TAIL_TOKENS = 1000
"""Tokens of a request's text that a viewer who comes late gets."""
Outcome = Literal["stop", "length", "tool_calls", "cancelled", "failed"]


class Sampled(Protocol):
    """The completion that a request is sampling, as far as the live view reads it."""

    exchange_id: str
    token_ids: list[int]
    timings: Timings | None
    num_cached_tokens: int
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """A request (one choice of it) that waits for the engine, is being sampled, or has ended."""

    project: str
    name: str
    policy_version: int
    rollout_id: str | None
    messages: list[Message]
    """The prompt's messages, which are only read. The list is empty once the request has ended."""
    num_prompt_tokens: int
    max_tokens: int
    completion: Sampled | None
    """What has been sampled; `None` once the request has ended."""
    token_bytes: Mapping[int, bytes]
    is_streamed: bool
    """Whether the engine reports tokens before the request ends."""
    id: str = ""
    """Id of the exchange."""
    started_at: float = field(default_factory=time.time)
    since: float = field(default_factory=time.monotonic)
    num_shown: int = 0
    """Tokens that viewers have got."""
    outcome: Outcome = "cancelled"
    error: str | None = None
    num_cached_tokens: int = 0
    num_sampled: int = 0
    """Number of sampled tokens, once the request has ended."""
    timings: Timings = field(default_factory=Timings)
    total_s: float = 0.0
    _decoder: codecs.IncrementalDecoder | None = None
    """Made with the first token that viewers get."""

    def __post_init__(self) -> None:
        if self.completion is not None:
            self.id = self.completion.exchange_id

    @property
    def token_ids(self) -> list[int]:
        return [] if self.completion is None else self.completion.token_ids

    def take(self) -> Piece | None:
        """Return what was sampled since the last call; `None` if nothing was."""
        fresh = self.token_ids[self.num_shown :]
        if not fresh:
            return None
        self.num_shown += len(fresh)
        table = self.token_bytes
        if self._decoder is None:
            self._decoder = _new_decoder()
        text = self._decoder.decode(b"".join([table[token] for token in fresh]))
        return Piece(id=self.id, text=text, num_tokens=len(fresh))

    def started(self) -> RequestStarted:
        """Describe the request with what viewers have got of its text."""
        last = self.messages[-1] if self.messages else {}
        shown = self.token_ids[max(0, self.num_shown - TAIL_TOKENS) : self.num_shown]
        raw = b"".join([self.token_bytes[token] for token in shown])
        return RequestStarted(
            id=self.id, project=self.project, name=self.name, policy_version=self.policy_version,
            rollout_id=self.rollout_id, last_role=last.get("role"),
            last_text=str(last.get("content") or "")[:LAST_TEXT_CHARS], num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens, started_at=self.started_at,
            text=_new_decoder().decode(raw), num_tokens=self.num_shown,
            is_text_known=self.is_streamed,
        )  # fmt: skip

    def end(self, error: Exception | None, *, is_cancelled: bool) -> None:
        """Keep the figures of the request that has ended, and forget its messages and tokens."""
        self.total_s = time.monotonic() - self.since
        completion = self.completion
        if completion is not None:
            self.num_sampled, self.num_cached_tokens = len(completion.token_ids), completion.num_cached_tokens
            self.timings = _closed(completion.timings or Timings(), self.total_s)
            self.outcome = completion.finish_reason or "failed"
        if error is not None:
            self.outcome, self.error = "failed", str(error).partition("\n")[0]
        elif is_cancelled:
            self.outcome = "cancelled"
        self.messages, self.completion = [], None

    def ended(self) -> RequestEnded:
        """Describe the request after its end."""
        timings = self.timings
        return RequestEnded(
            id=self.id, project=self.project, name=self.name, policy_version=self.policy_version,
            rollout_id=self.rollout_id, outcome=self.outcome, error=self.error,
            num_prompt_tokens=self.num_prompt_tokens, num_cached_tokens=self.num_cached_tokens,
            num_tokens=self.num_sampled, started_at=self.started_at, total_s=self.total_s,
            queue_s=timings.queue_s, prefill_s=timings.prefill_s, decode_s=timings.decode_s,
        )  # fmt: skip


def _closed(timings: Timings, total_s: float) -> Timings:
    """Fill in the decoding time of a request that was ended before the engine's last chunk, e.g. at a stop string."""
    if timings.decode_s is not None or timings.queue_s is None or timings.prefill_s is None:
        return timings
    return replace(timings, decode_s=max(0.0, total_s - timings.queue_s - timings.prefill_s))


def _new_decoder() -> codecs.IncrementalDecoder:
    """Make a decoder that holds back the bytes of a character until they are complete."""
    return codecs.getincrementaldecoder("utf-8")("replace")


FLUSH_S = 0.2
"""Time between two deliveries to viewers. Each costs a write per viewer; the page lets the text flow between two."""
MAX_EVENTS = 2048
MAX_CHARS = 4_000_000
"""Largest number of characters of sampled text that wait for a viewer."""
MAX_ENDED = 100
"""Ended requests that a new viewer gets."""
Project = str | None


class _Viewer:
    """The events that wait for one viewer of a project; `None` means all projects."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.events: list[LiveEvent] = []
        self.num_chars = 0
        self.num_lost = 0
        """Tokens of events that were dropped, because too much waited."""
        self.is_behind = False
        self.changed = asyncio.Event()

    def sees(self, project: Project) -> bool:
        return self.project is None or self.project == project

    def put(self, event: LiveEvent) -> None:
        self.events.append(event)
        if isinstance(event.data, Tokens):
            self.num_chars += sum(len(piece.text) for piece in event.data.pieces)
        if self.is_behind or len(self.events) > MAX_EVENTS or self.num_chars > MAX_CHARS:
            self.is_behind = True
            self.num_lost += sum(_num_tokens(one) for one in self.take())

    def take(self) -> list[LiveEvent]:
        events, self.events, self.num_chars = self.events, [], 0
        return events


class LiveHub:
    """Takes events from one server, and gives them to those who watch. It belongs to one event loop."""

    def __init__(self) -> None:
        self.running: dict[str, LiveRequest] = {}
        """Requests without an answer, by id, oldest first."""
        self.answered: dict[tuple[str, str], float] = {}
        """When a request of each model (project, name) last ended with an answer, by `time.monotonic`."""
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_ENDED)
        self._viewers: list[_Viewer] = []
        self._number = time.time_ns() // 1_000_000  # so that numbers of an earlier server are in the past
        self._fresh: dict[str, LiveRequest] = {}
        """Requests with tokens that viewers have not got."""
        self._last_pieces: list[tuple[str, Piece]] = []
        """The last tokens of requests that have ended, and their projects."""
        self._ends: list[tuple[str, RequestEnded]] = []
        """Ends that wait until the tokens before them are published."""
        self._flush_timer: asyncio.TimerHandle | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def is_watched(self, project: Project) -> bool:
        """Whether somebody watches this project; with `None`, whether somebody watches all."""
        return any(viewer.sees(project) for viewer in self._viewers)

    @contextlib.contextmanager
    def followed(self, request: LiveRequest) -> Iterator[LiveRequest]:
        """Follow a request during the body, from its wait for the engine to its recorded answer."""
        self.running[request.id] = request
        if self.is_watched(request.project):
            self.publish(request.project, request.started())
        failure: Exception | None = None
        is_cancelled = True
        try:
            yield request
            is_cancelled = False
        except Exception as error:  # the cancellation of a request is none
            failure = error
            raise
        finally:
            self._end(request, failure, is_cancelled=is_cancelled)

    def sampled(self, request: LiveRequest) -> None:
        """A request has sampled tokens."""
        if self.is_watched(request.project):
            self._fresh[request.id] = request
            self._flush_soon()

    def _end(self, request: LiveRequest, failure: Exception | None, *, is_cancelled: bool) -> None:
        del self.running[request.id]
        is_watched = self.is_watched(request.project)
        if is_watched:
            self._fresh.pop(request.id, None)
            if (piece := request.take()) is not None:
                self._last_pieces.append((request.project, piece))
        request.end(failure, is_cancelled=is_cancelled)
        self._ended.append(request)
        if request.outcome not in ("cancelled", "failed"):
            self.answered[request.project, request.name] = time.monotonic()
        if is_watched:
            self._ends.append((request.project, request.ended()))
            self._flush_soon()

    def publish(self, project: Project, data: LiveData) -> None:
        """Send an event to those who watch `project`; `None` is only for those who watch all projects."""
        if not self.is_watched(project):
            return
        self._number += 1
        event = LiveEvent(number=self._number, at=time.time(), data=data)
        for viewer in self._viewers:
            if viewer.sees(project):
                viewer.put(event)
        self._flush_soon()

    async def watch(self, project: Project) -> AsyncGenerator[list[LiveEvent], None]:
        """Yield what runs now, then events as they happen, some at a time, until the generator is closed.

        Args:
            project: only this project; `None` for all.
        """
        viewer = _Viewer(project)
        self._flush()
        for request in self.running.values():  # what was streamed to clients while nobody watched
            if viewer.sees(request.project) and not self.is_watched(request.project):
                request.take()
        self._viewers.append(viewer)
        try:
            yield self._opening(viewer)
            while True:
                await viewer.changed.wait()
                viewer.changed.clear()
                if viewer.is_behind:
                    self._flush()
                    yield self._opening(viewer)
                elif events := viewer.take():
                    yield events
        finally:
            self._leave(viewer)

    def _opening(self, viewer: _Viewer) -> list[LiveEvent]:
        """What a viewer gets who has nothing: the requests that run now, and the newest that have ended."""
        number, now = self._number, time.time()
        data: list[LiveData] = [Reset(num_lost_tokens=viewer.num_lost)]
        data += [request.started() for request in self.running.values() if viewer.sees(request.project)]
        data += [request.ended() for request in self._ended if viewer.sees(request.project)]
        viewer.is_behind, viewer.num_lost = False, 0
        return [LiveEvent(number=number, at=now, data=one) for one in data]

    def _flush_soon(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        """Publish what requests have sampled, one event for each project, then which have ended, and tell viewers."""
        pieces: dict[str, list[Piece]] = {}
        for project, last in self._last_pieces:
            pieces.setdefault(project, []).append(last)
        for request in self._fresh.values():
            if (piece := request.take()) is not None:
                pieces.setdefault(request.project, []).append(piece)
        ends, self._ends = self._ends, []
        self._last_pieces.clear()
        self._fresh.clear()
        for project, sampled in pieces.items():
            self.publish(project, Tokens(pieces=sampled))
        for project, end in ends:
            self.publish(project, end)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        for viewer in self._viewers:
            if viewer.events or viewer.is_behind:
                viewer.changed.set()

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.remove(viewer)
        if not self._viewers:
            self._fresh.clear()
            self._last_pieces.clear()
            self._ends.clear()


def _num_tokens(event: LiveEvent) -> int:
    return sum(piece.num_tokens for piece in event.data.pieces) if isinstance(event.data, Tokens) else 0
