"""Writes the evidence (what a judge sees of trajectories) as one JSON document, out of which agents' text cannot break.

    BEGIN EVIDENCE 5f0c91e2
    {"context": [<messages that all share>], "trajectories": [{"id": "t-k4wz", "messages": [...]}, ...]}
    END EVIDENCE 5f0c91e2

The document contains text that agents wrote, and some agents will learn to address the judge. Their text is inside JSON
strings, so it cannot end a line, close a tag or start another trajectory. Marker and ids are random in each request, so
they cannot be guessed. Invisible characters are written as escapes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from art.trajectory import Trajectory

_ID_LETTERS = "bcdfghjkmnpqrstvwxz23456789"
_MAX_DATA_URL = 200
_UNSEEN = re.compile(
    "[<>&\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff0-\uffff"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The part of one trajectory that the judge sees."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    histories: list[list[dict[str, Any]]]
    """Further conversations of the same rollout."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the content, in hex. Trajectories with equal digests look the same to a judge."""
        return digest([self.messages, self.tools, self.histories])


def evidence_of(trajectory: Trajectory) -> Evidence:
    return Evidence(
        messages=_shortened(trajectory.messages()),
        tools=list(trajectory.tools) if trajectory.tools else None,
        histories=[_shortened(history.messages()) for history in trajectory.additional_histories],
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _shortened(value: Any) -> Any:
    """Copy `value` without the data of images and files, which a judge cannot read as text."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and value.startswith("data:") and len(value) > _MAX_DATA_URL:
        return f"{value.partition(',')[0]}, {len(value)} characters, left out"
    return value


def common_prefix(message_lists: Sequence[Sequence[Any]]) -> int:
    """Number of messages at the start that are equal in all lists; 0 for a single list.

    The last message of a list does not count: a trajectory that is the beginning of another would look empty.
    """
    if len(message_lists) < 2:
        return 0
    rows = zip(*(messages[:-1] for messages in message_lists), strict=False)
    return sum(1 for _ in takewhile(lambda row: all(message == row[0] for message in row), rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The text that shows a judge several trajectories, with the random marker and ids that it contains."""

    text: str
    """The JSON with its marker lines."""
    marker: str
    ids: list[str]
    """One random id per trajectory, in the order in which they are shown."""


def write_document(evidence: Sequence[Evidence], *, reference: str | None, rng: random.Random) -> Document:
    """Write the document that shows a judge several trajectories. Messages and tools that all share appear once."""
    shared = common_prefix([item.messages for item in evidence])
    same_tools = all(item.tools == evidence[0].tools for item in evidence)
    content: dict[str, Any] = {}
    if shared:
        content["context"] = evidence[0].messages[:shared]
    if same_tools and evidence[0].tools:
        content["available_tools"] = evidence[0].tools
    if reference is not None:
        content["reference_answer"] = reference
    trajectories = [
        {"messages": item.messages[shared:]}
        | ({"other_conversations": item.histories} if item.histories else {})
        | ({"available_tools": item.tools} if item.tools and not same_tools else {})
        for item in evidence
    ]
    body = encode([content, trajectories])
    marker = _unused(body, rng, 10)
    unique: dict[str, None] = {}
    while len(unique) < len(evidence):
        unique[f"t-{_unused(body, rng, 4)}"] = None
    ids = list(unique)
    content["trajectories"] = [{"id": name} | item for name, item in zip(ids, trajectories, strict=True)]
    return Document(text=f"BEGIN EVIDENCE {marker}\n{encode(content)}\nEND EVIDENCE {marker}", marker=marker, ids=ids)


def encode(value: Any) -> str:
    """Write JSON on one line, with escapes for invisible characters and for those that could be read as markup."""

    def escaped(match: re.Match[str]) -> str:
        data = match.group().encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{data[i : i + 4]}" for i in range(0, len(data), 4))

    return _UNSEEN.sub(escaped, json.dumps(value, ensure_ascii=False, default=str))


def _unused(body: str, rng: random.Random, length: int) -> str:
    """A random word that does not occur in `body`."""
    while True:
        word = "".join(rng.choices(_ID_LETTERS, k=length))
        if word not in body:
            return word
