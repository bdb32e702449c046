"""What is being sampled now, for people who watch.

    gateway --start, sampled, end--> LiveHub --> ring of events --watch--> any number of viewers
    jobs, log --publish-------------->

Nobody watches: a request costs a small object, and nothing is kept but the newest ended requests. Somebody watches:
everything that happens within `FLUSH_S` goes out together, and the tokens of all requests of a project as one event. A
viewer has a place in the one ring and no queue of its own. So a slow one costs no memory and delays nobody: when the
ring has passed its place, it starts over from what runs now.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator

from art.gateway.live.requests import LiveRequest
from art.protocol.live.events import LiveData, LiveEvent, Piece, RequestEnded, Reset, Tokens

FLUSH_S = 0.2
"""Time between two deliveries to viewers. Each costs a write per viewer; the page lets the text flow between two."""
MAX_EVENTS = 2048
MAX_CHARS = 4_000_000
"""Largest number of characters of sampled text in the ring."""
MAX_ENDED = 100
"""Ended requests that a new viewer gets."""
GRACE_S = 30.0
"""Events are kept for this long after the last viewer left, for one that lost its connection."""
Project = str | None


class LiveHub:
    """Takes events from one server, and gives them to those who watch. It belongs to one event loop."""

    def __init__(self) -> None:
        self.running: dict[str, LiveRequest] = {}
        """Requests without an answer, by id, oldest first."""
        self.answered: dict[tuple[str, str], float] = {}
        """When a request of each model (project, name) last ended with an answer, by `time.monotonic`."""
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_ENDED)
        self._events: dict[int, tuple[Project, LiveEvent]] = {}
        """The ring: events by number, without a gap, oldest first."""
        self._number = time.time_ns() // 1_000_000  # so that numbers of an earlier server are in the past
        self._num_chars = 0
        self._num_tokens: Counter[Project] = Counter()
        """Tokens that were published since the server began, by project; `None` is all."""
        self._viewers: Counter[Project] = Counter()
        self._watched_since: dict[Project, int] = {}
        """Number of the first event after the present viewers of a project began to watch it."""
        self._fresh: dict[str, LiveRequest] = {}
        """Requests with tokens that viewers have not got."""
        self._last_pieces: list[tuple[str, Piece]] = []
        """The last tokens of requests that have ended, and their projects."""
        self._ends: list[tuple[str, RequestEnded]] = []
        """Ends that wait until the tokens before them are published."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        """Viewers, with those who left a moment ago."""
        return sum(self._viewers.values())

    def is_watched(self, project: Project) -> bool:
        """Whether somebody watches this project; with `None`, whether somebody watches all."""
        viewers = self._viewers
        return bool(viewers) and (viewers[None] > 0 or (project is not None and viewers[project] > 0))

    @contextlib.contextmanager
    def followed(self, request: LiveRequest) -> Iterator[LiveRequest]:
        """Follow a request during the body, from its wait for the engine to its recorded answer."""
        self.running[request.id] = request
        if self._viewers and self.is_watched(request.project):
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
        if self._viewers and self.is_watched(request.project):
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
        self._events[self._number] = project, LiveEvent(number=self._number, at=time.time(), data=data)
        self._num_chars += _num_chars(data)
        while len(self._events) > MAX_EVENTS or self._num_chars > MAX_CHARS:
            self._drop_oldest()
        self._flush_soon()

    async def watch(self, project: Project, after: int | None) -> AsyncGenerator[list[LiveEvent], None]:
        """Yield what runs now, then events as they happen, some at a time, until the generator is closed.

        Args:
            project: only this project; `None` for all.
            after: number of the last event that the viewer has got. If the ring still has those after it, they come
                instead of what runs now.
        """
        self._enter(project)
        try:
            self._flush()
            place, num_seen = self._number, self._num_tokens[project]
            if after is not None and self._has_all_after(after, project):
                place = after
                num_seen -= sum(map(_num_tokens, self._after(after, project)))
            else:
                yield self._opening(project, 0)
            while True:
                if place == self._number:
                    await self._changed.wait()
                elif place + 1 in self._events:
                    events = self._after(place, project)
                    place = self._number
                    num_seen += sum(map(_num_tokens, events))
                    if events:
                        yield events
                else:  # the ring has passed the viewer
                    self._flush()
                    place, num_lost = self._number, self._num_tokens[project] - num_seen
                    num_seen += num_lost
                    yield self._opening(project, num_lost)
        finally:
            self._leave(project)

    def _opening(self, project: Project, num_lost: int) -> list[LiveEvent]:
        """What a viewer gets who has nothing: the requests that run now, and the newest that have ended."""
        number, now = self._number, time.time()
        data: list[LiveData] = [Reset(num_lost_tokens=num_lost)]
        data += [request.started() for request in self.running.values() if project in (None, request.project)]
        data += [request.ended() for request in self._ended if project in (None, request.project)]
        return [LiveEvent(number=number, at=now, data=one) for one in data]

    def _has_all_after(self, number: int, project: Project) -> bool:
        """Whether the ring has everything of a project that happened after an event."""
        is_kept = number == self._number or number + 1 in self._events
        since = [self._watched_since[of] for of in {project, None} if of in self._watched_since]
        return is_kept and number <= self._number and number >= min(since)

    def _after(self, place: int, project: Project) -> list[LiveEvent]:
        kept = map(self._events.__getitem__, range(place + 1, self._number + 1))
        return [event for of, event in kept if project is None or of == project]

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
            self._publish_tokens(project, Tokens(pieces=sampled))
        for project, end in ends:
            self.publish(project, end)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _publish_tokens(self, project: str, tokens: Tokens) -> None:
        count = sum(piece.num_tokens for piece in tokens.pieces)
        self._num_tokens[project] += count
        self._num_tokens[None] += count
        self.publish(project, tokens)

    def _drop_oldest(self) -> None:
        _, event = self._events.pop(next(iter(self._events)))
        self._num_chars -= _num_chars(event.data)

    def _enter(self, project: Project) -> None:
        for request in self.running.values():  # what was streamed to clients while nobody watched
            if project in (None, request.project) and not self.is_watched(request.project):
                request.take()
        self._viewers[project] += 1
        self._watched_since.setdefault(project, self._number + 1)

    def _leave(self, project: Project) -> None:
        try:
            asyncio.get_running_loop().call_later(GRACE_S, self._forget, project)
        except RuntimeError:  # the loop has ended, and nothing will be sampled any more
            self._forget(project)

    def _forget(self, project: Project) -> None:
        self._viewers[project] -= 1
        if self._viewers[project] <= 0:
            del self._viewers[project], self._watched_since[project]
        if not self._viewers:
            self._events.clear()
            self._fresh.clear()
            self._last_pieces.clear()
            self._ends.clear()
            self._num_chars = 0


def _num_chars(data: LiveData) -> int:
    return sum(len(piece.text) for piece in data.pieces) if isinstance(data, Tokens) else 0


def _num_tokens(event: LiveEvent) -> int:
    return sum(piece.num_tokens for piece in event.data.pieces) if isinstance(event.data, Tokens) else 0
