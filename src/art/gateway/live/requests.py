"""One request as the live view follows it, from its start to its end."""

from __future__ import annotations

import codecs
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from art.engine import Timings
from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.live.events import LAST_TEXT_CHARS, Piece, RequestEnded, RequestStarted

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
