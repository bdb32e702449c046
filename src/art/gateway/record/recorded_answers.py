"""Recorded answers as training reads them: tokens and log-probs as arrays, which are read and compared fast.

A step may learn from thousands of exchanges of thousands of tokens each. As lists of Python's numbers they would take
ten times the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.samples import Constraint

Segments: TypeAlias = list[tuple[int, int]]
"""Step and number of tokens of each part, in order.

Example: [(3, 40), (4, 25)] for 65 tokens, of which step 3 sampled the first 40.
"""


def pack_segments(segments: Segments) -> str | None:
    """Return the value of the column `segments`: `None` where one step sampled the whole answer."""
    return orjson.dumps(segments).decode() if segments else None


def unpack_segments(value: str | None) -> Segments:
    """Read a value of the column `segments`."""
    return [] if value is None else [(step, num_tokens) for step, num_tokens in orjson.loads(value)]


def join_segments(parts: Iterable[tuple[int, int]]) -> Segments:
    """Join neighbouring parts of the same step. Return an empty list if one step sampled all tokens."""
    joined: Segments = []
    for step, num_tokens in parts:
        if joined and joined[-1][0] == step:
            joined[-1] = (step, joined[-1][1] + num_tokens)
        elif num_tokens:
            joined.append((step, num_tokens))
    return joined if len(joined) > 1 else []


TokenArray = NDArray[np.uint32]

TEXTS = ("new_messages", "message")
COLUMNS = (
    "id", "project", "name", "policy_version", "parent_id", "prompt_tail", "completion", "logprobs", "temperature",
    "top_p", "finish_reason", "new_messages", "tools", "message", "segments", "constrained",
)  # fmt: skip
_PLAIN = ("id", "project", "name", "policy_version", "temperature", "top_p", "finish_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """An exchange (recorded request and answer) as training reads it; `Exchange` explains the fields."""

    id: str
    project: str
    name: str
    policy_version: int
    prompt_token_ids: TokenArray  # [P]
    completion_token_ids: TokenArray  # [C]
    sampling_logprobs: NDArray[np.float64]  # [C]
    temperature: float
    top_p: float
    finish_reason: FinishReason
    has_tools: bool
    constraint: Constraint | None = None
    texts: tuple[bytes, ...] = ()
    """The messages as JSON: a list of messages, an answer, a list of messages, ..., and last this answer."""
    segments: Segments = field(default_factory=list)

    def parts(self) -> Segments:
        """Step and number of tokens of each part of the answer, in order; a single part for most."""
        return self.segments or [(self.policy_version, len(self.completion_token_ids))]

    def message(self) -> Message:
        message: Message = orjson.loads(self.texts[-1])
        return message

    def request_messages(self) -> list[Message]:
        """Read the messages before the answer. This takes long beside the rest, so it is done only on demand."""
        messages: list[Message] = []
        for number, text in enumerate(self.texts[:-1]):
            part = orjson.loads(text)
            messages += [part] if number % 2 else part
        return messages


def assemble_answers(rows: Iterable[tuple[Any, ...]]) -> dict[str, RecordedAnswer]:
    """Build answers, without constraints, from rows of `COLUMNS`, which must include all their ancestors."""
    by_id = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows}
    built: dict[str, RecordedAnswer] = {}
    for row in by_id.values():
        chain = []
        missing: dict[str, Any] | None = row
        while missing is not None and missing["id"] not in built:
            chain.append(missing)
            missing = by_id[missing["parent_id"]] if missing["parent_id"] is not None else None
        for link in reversed(chain):
            built[link["id"]] = _build(link, None if link["parent_id"] is None else built[link["parent_id"]])
    return built


def _build(row: dict[str, Any], parent: RecordedAnswer | None) -> RecordedAnswer:
    prompt = np.frombuffer(row["prompt_tail"], dtype=np.uint32)
    texts, has_tools = (row["new_messages"], row["message"]), row["tools"] not in (None, b"[]")
    if parent is not None:
        prompt = np.concatenate([parent.prompt_token_ids, parent.completion_token_ids, prompt])
        texts, has_tools = (*parent.texts, *texts), parent.has_tools
    return RecordedAnswer(
        **{name: row[name] for name in _PLAIN},
        prompt_token_ids=prompt,
        completion_token_ids=np.frombuffer(row["completion"], dtype=np.uint32),
        sampling_logprobs=np.frombuffer(row["logprobs"], dtype=np.float64),
        has_tools=has_tools,
        texts=texts,
        segments=unpack_segments(row["segments"]),
    )
