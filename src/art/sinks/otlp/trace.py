"""Spans and traces as plain values, and what identifies a rollout. This module knows nothing of protobuf or HTTP."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from art.sinks.otlp.scores import Evaluation
from art.sinks.otlp.times import Period
from art.sinks.sink import Run

Value = str | bool | int | float | list[str]
MAX_NAMED = 100
"""Number of a rollout's metrics, and of entries of its metadata, that become attributes."""
MAX_NAME = 200
"""Characters of names and ids."""


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at: float
    """Seconds since the epoch."""
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    trace_id: bytes  # [16]
    span_id: bytes  # [8]
    parent_id: bytes | None = None
    name: str
    kind: Literal["internal", "client"] = "internal"
    period: Period
    attributes: dict[str, Value]
    events: list[SpanEvent] = field(default_factory=list)
    error: str | None = None
    """Why the operation failed; `None` if it did not."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a rollout in the log of a run."""

    run: Run
    split: str
    step: int
    group: int
    """Position among all groups of the split and step, from 0."""
    index: int
    """Position in the group, from 0. Failed rollouts come after those that have a trajectory."""

    @property
    def path(self) -> str:
        return f"{self.run.project}/{self.run.name}/{self.split}/{self.step}/{self.group}/{self.index}"


@dataclass(frozen=True, slots=True)
class SpanSettings:
    content: bool = False
    """Whether texts are sent: messages, tools, judges' explanations, metadata, errors' messages."""
    max_characters: int = 100_000
    """Longest text of one attribute, about. Longer conversations keep their newest messages."""


@dataclass(frozen=True, slots=True)
class RolloutTrace:
    """The trace of one rollout; its first span is the rollout itself."""

    spans: list[Span]
    evaluations: list[Evaluation]

    @property
    def root(self) -> Span:
        return self.spans[0]


def agent_span(place: Place) -> tuple[str, dict[str, Value]]:
    """Return the name and the attributes that the first span of every rollout has."""
    run = place.run
    return f"invoke_agent {run.name}", {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "art",
        "gen_ai.agent.name": run.name,
        "gen_ai.request.model": f"{run.project}/{run.name}",
        "gen_ai.conversation.id": place.path,
        "art.project": run.project,
        "art.model": run.name,
        "art.run": run.id,
        "art.split": place.split,
        "art.step": place.step,
        "art.group": place.group,
        "art.rollout": place.index,
    }


def hash_of(*parts: object) -> bytes:
    """Return 32 bytes that are the same for the same parts, of which ids take their first bytes."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
