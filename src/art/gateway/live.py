"""What is being sampled now, for people who watch.

    gateway --start, sampled, end--> LiveHub --> one log of events --watch--> viewers
    jobs, log --publish------------>

Nobody watches: a request costs a small object, and nothing is kept but the newest ended requests. Somebody watches:
everything that happens within `FLUSH_S` goes out together, and the tokens of all requests of a project as one event. A
viewer that reads so slowly that the log has lost its place starts over from what runs now. It delays nobody.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from art.engine import Timings
from art.gateway.completion import Completion
from art.gateway.policies import PolicyRef
from art.gateway.turn import Turn
from art.protocol.live import LAST_TEXT_CHARS, LiveData, LiveEvent, Piece, RequestEnded, RequestStarted, Reset, Tokens

FLUSH_S = 0.2
"""Time between two deliveries to viewers. Each costs a write per viewer; the page lets the text flow between two."""
HEARTBEAT_S = 15.0
"""Longest time without a word to a viewer. Proxies close connections that are silent for a minute."""
MAX_EVENTS = 2048
"""Events that wait for viewers."""
MAX_ENDED = 100
"""Ended requests that a new viewer gets."""
TAIL_TOKENS = 1000
"""Tokens of a request's text that a viewer who comes late gets."""
SCENARIO_CHARS = 80
"""Characters of the first question that are shown in place of a scenario's name, where it has none."""
Project = str | None


def _new_decoder() -> codecs.IncrementalDecoder:
    """Make a decoder that holds back the bytes of a character until they are complete."""
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request (one choice of it) that waits for the engine or is being sampled."""

    turn: Turn
    policy: PolicyRef
    completion: Completion
    is_streamed: bool
    """Whether the engine reports tokens before the request ends."""
    started_at: float = field(default_factory=time.time)
    since: float = field(default_factory=time.monotonic)
    num_shown: int = 0
    """Tokens that viewers have got."""
    decoder: codecs.IncrementalDecoder = field(default_factory=_new_decoder)

    def _text(self, token_ids: list[int], decoder: codecs.IncrementalDecoder) -> str:
        table = self.turn.renderer.tokenizer.token_bytes
        return decoder.decode(b"".join([table[token] for token in token_ids]))

    def _fields(self) -> dict[str, Any]:
        policy, messages = self.policy, self.turn.messages
        question = next((one.get("content") for one in messages if one.get("role") == "user"), None)
        return {
            "id": self.completion.exchange_id, "project": policy.project, "name": policy.name,
            "policy_version": policy.policy_version, "rollout_id": self.turn.rollout_id,
            "scenario": self.turn.scenario or (str(question)[:SCENARIO_CHARS] if question else None),
            "turn": 1 + sum(one.get("role") == "assistant" for one in messages),
            "num_prompt_tokens": len(self.turn.prompt_token_ids), "started_at": self.started_at,
        }  # fmt: skip

    def take(self) -> Piece | None:
        """Return what was sampled since the last call; `None` if nothing was."""
        if not (fresh := self.completion.token_ids[self.num_shown :]):
            return None
        self.num_shown += len(fresh)
        return Piece(id=self.completion.exchange_id, text=self._text(fresh, self.decoder), num_tokens=len(fresh))

    def started(self) -> RequestStarted:
        """Describe the request with what viewers have got of its text."""
        last = self.turn.messages[-1] if self.turn.messages else {}
        shown = self.completion.token_ids[max(0, self.num_shown - TAIL_TOKENS) : self.num_shown]
        return RequestStarted(
            **self._fields(), last_role=last.get("role"), last_text=str(last.get("content") or "")[:LAST_TEXT_CHARS],
            max_tokens=self.turn.max_tokens, text=self._text(shown, _new_decoder()), num_tokens=self.num_shown,
            is_text_known=self.is_streamed,
        )  # fmt: skip

    def ended(self, failure: BaseException | None) -> RequestEnded:
        """Describe the request after its end."""
        completion, total_s = self.completion, time.monotonic() - self.since
        timings = completion.timings or Timings()
        decode_s = timings.decode_s
        if decode_s is None and timings.queue_s is not None and timings.prefill_s is not None:
            # It ended before the engine's last chunk, e.g. at a stop string.
            decode_s = max(0.0, total_s - timings.queue_s - timings.prefill_s)
        is_failed = isinstance(failure, Exception) or (failure is None and completion.finish_reason is None)
        return RequestEnded(
            **self._fields(),
            outcome="failed" if is_failed else "cancelled" if failure else completion.finish_reason or "failed",
            error=str(failure).partition("\n")[0] if isinstance(failure, Exception) else None,
            num_cached_tokens=completion.num_cached_tokens, num_tokens=len(completion.token_ids), total_s=total_s,
            queue_s=timings.queue_s, prefill_s=timings.prefill_s, decode_s=decode_s,
        )  # fmt: skip


def _sees(viewer: Project, project: Project) -> bool:
    return viewer is None or viewer == project


class LiveHub:
    """Takes events from one server, and gives them to those who watch. It belongs to one event loop."""

    def __init__(
        self, *, flush_s: float = FLUSH_S, max_events: int = MAX_EVENTS, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self.running: dict[str, LiveRequest] = {}
        """Requests without an answer, by id, oldest first."""
        self.ended: deque[RequestEnded] = deque(maxlen=MAX_ENDED)
        """The newest requests that have ended, oldest first."""
        self.answered: dict[tuple[str, str], float] = {}
        """When a request of each model (project, name) last ended with an answer, by `time.monotonic`."""
        self._flush_s, self._heartbeat_s = flush_s, heartbeat_s
        self._viewers: list[Project] = []
        """The project of each viewer; `None` for all."""
        self._log: deque[tuple[Project, LiveEvent]] = deque(maxlen=max_events)
        """The newest events that somebody watches, numbered without a gap."""
        self._number = time.time_ns() // 1_000_000  # so that numbers of an earlier server are in the past
        self._fresh: dict[str, LiveRequest] = {}
        """Requests with tokens that viewers have not got."""
        self._news = asyncio.Event()
        """Set, and replaced by another, when viewers may go on."""
        self._flush_timer: asyncio.TimerHandle | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def is_watched(self, project: Project) -> bool:
        """Whether somebody watches this project; with `None`, whether somebody watches all."""
        return any(_sees(viewer, project) for viewer in self._viewers)

    @contextlib.contextmanager
    def followed(self, request: LiveRequest) -> Iterator[LiveRequest]:
        """Follow a request during the body, from its wait for the engine to its recorded answer."""
        key, project, name = request.completion.exchange_id, request.policy.project, request.policy.name
        self.running[key] = request
        if self.is_watched(project):
            self.publish(project, request.started())
        failure: BaseException | None = None
        try:
            yield request
        except BaseException as error:
            failure = error
            raise
        finally:
            del self.running[key]
            self._fresh.pop(key, None)
            if self.is_watched(project) and (piece := request.take()) is not None:
                self.publish(project, Tokens(pieces=[piece]))
            end = request.ended(failure)
            self.ended.append(end)
            if end.outcome not in ("cancelled", "failed"):
                self.answered[project, name] = time.monotonic()
            self.publish(project, end)

    def sampled(self, request: LiveRequest) -> None:
        """A request has sampled tokens."""
        if self.is_watched(request.policy.project):
            self._fresh[request.completion.exchange_id] = request
            self._flush_soon()

    def publish(self, project: str, data: LiveData) -> None:
        """Send an event to those who watch `project`, or all projects."""
        if self.is_watched(project):
            self._number += 1
            self._log.append((project, LiveEvent(number=self._number, at=time.time(), data=data)))
            self._flush_soon()

    async def watch(self, project: Project) -> AsyncGenerator[list[LiveEvent], None]:
        """Yield what runs now, then events as they happen, some at a time, until the generator is closed. With a
        `project` only its own. After each `HEARTBEAT_S` without an event, an empty list comes."""
        self._flush()
        for request in self.running.values():  # what was streamed to clients while nobody watched
            if _sees(project, request.policy.project) and not self.is_watched(request.policy.project):
                request.take()
        self._viewers.append(project)
        seen = -1
        try:
            while True:
                begin = self._log[0][1].number if self._log else self._number + 1
                if seen < begin - 1:  # this viewer has nothing: send what runs now, and the newest that have ended
                    self._flush()
                    data: list[LiveData] = [Reset()]
                    data += [one.started() for one in self.running.values() if _sees(project, one.policy.project)]
                    data += [end for end in self.ended if _sees(project, end.project)]
                    batch = [LiveEvent(number=self._number, at=time.time(), data=one) for one in data]
                else:
                    rest = itertools.islice(self._log, seen + 1 - begin, None)
                    batch = [event for owner, event in rest if _sees(project, owner)]
                seen = self._number
                if batch:
                    yield batch
                while self._number == seen:
                    try:
                        await asyncio.wait_for(self._news.wait(), self._heartbeat_s)
                    except TimeoutError:
                        yield []
        finally:
            self._viewers.remove(project)
            if not self._viewers:
                self._log.clear()
                self._fresh.clear()

    def _flush_soon(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(self._flush_s, self._flush)

    def _flush(self) -> None:
        """Publish what requests have sampled, one event for each project, and let viewers go on."""
        pieces: dict[str, list[Piece]] = {}
        for request in self._fresh.values():
            if (piece := request.take()) is not None:
                pieces.setdefault(request.policy.project, []).append(piece)
        self._fresh.clear()
        for project, sampled in pieces.items():
            self.publish(project, Tokens(pieces=sampled))
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._news.set()
        self._news = asyncio.Event()
