"""Recorded answers as training reads them: tokens and log-probs as arrays, which are read and compared fast.

A step may learn from thousands of exchanges of thousands of tokens each. As lists of Python's numbers they would take
ten times the memory. And the columns of the table `exchanges` that are packed:

segments       JSON of the steps that sampled an answer, and of how many tokens each; NULL for a single step
alternatives   ids and log-probs of the most likely tokens at each place; NULL unless a setting asks for them
constrained    what an answer was drawn from: the hash (SHA-256) of a grammar, which is stored once in the table
               `grammars` (64 zeros for none), then JSON of the rest; NULL for most answers
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from art.protocol.answers import FinishReason
from art.protocol.chat import Message
from art.protocol.compact import pack_token_sets, unpack_token_sets
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


_ALTERNATIVE = np.dtype([("token", "<u4"), ("logprob", "<f4")])


def pack_alternatives(alternatives: Sequence[Sequence[tuple[int, float]]]) -> bytes | None:
    """Return the value of the column `alternatives`, 8 bytes for each; `None` where there are none.

    Args:
        alternatives: [C][up to K] tokens with their log-probs. Places with fewer are filled with a log-prob of -inf.
    """
    most = max(map(len, alternatives), default=0)
    if not most:
        return None
    return np.array([[*row, *[(0, -np.inf)] * (most - len(row))] for row in alternatives], dtype=_ALTERNATIVE).tobytes()


def unpack_alternatives(value: bytes, num_tokens: int) -> list[list[tuple[int, float]]]:
    """Read a value of the column `alternatives` of an answer of C tokens. Returns [C][up to K], best first."""
    rows = np.frombuffer(value, dtype=_ALTERNATIVE).reshape(num_tokens, -1).tolist()
    return [[(token, logprob) for token, logprob in row if logprob > -np.inf] for row in rows]


def join_segments(parts: Iterable[tuple[int, int]]) -> Segments:
    """Join neighbouring parts of the same step. Return an empty list if one step sampled all tokens."""
    joined: Segments = []
    for step, num_tokens in parts:
        if joined and joined[-1][0] == step:
            joined[-1] = (step, joined[-1][1] + num_tokens)
        elif num_tokens:
            joined.append((step, num_tokens))
    return joined if len(joined) > 1 else []


GRAMMARS = """
CREATE TABLE IF NOT EXISTS grammars (hash TEXT PRIMARY KEY, text TEXT NOT NULL, version TEXT NOT NULL) WITHOUT ROWID;
"""
_HASH_SIZE = 64
_NO_GRAMMAR = "0" * _HASH_SIZE
_KEY = f"substr(constrained, 1, {_HASH_SIZE})"
GRAMMAR_INDEX = f"CREATE INDEX IF NOT EXISTS exchanges_by_grammar ON exchanges ({_KEY}) WHERE constrained IS NOT NULL"


def pack_constraint(db: sqlite3.Connection, constraint: Constraint | None) -> str | None:
    """Store a constraint's grammar, and return the value of its exchange's column `constrained`."""
    if constraint is None:
        return None
    key = _NO_GRAMMAR
    if constraint.grammar is not None:
        key = hashlib.sha256(constraint.grammar.encode()).hexdigest()
        row = key, constraint.grammar, importlib.metadata.version("llguidance")
        db.execute("INSERT OR IGNORE INTO grammars VALUES (?, ?, ?)", row)
    kept = None if constraint.kept is None else pack_token_sets(constraint.kept)
    return key + orjson.dumps({"stop_token_ids": constraint.stop_token_ids, "kept": kept}).decode()


def unpack_constraint(value: str, grammars: Mapping[str, str]) -> Constraint:
    """Read a value of the column `constrained`. `grammars` has the texts by hash."""
    key, rest = value[:_HASH_SIZE], orjson.loads(value[_HASH_SIZE:])
    return Constraint(
        grammar=None if key == _NO_GRAMMAR else grammars[key],
        stop_token_ids=rest["stop_token_ids"],
        kept=None if rest["kept"] is None else unpack_token_sets(rest["kept"]),
    )


def grammar_hashes(values: Iterable[str]) -> list[str]:
    """Hashes of the grammars that values of the column `constrained` name."""
    return sorted({value[:_HASH_SIZE] for value in values} - {_NO_GRAMMAR})


def delete_unused_grammars(db: sqlite3.Connection) -> None:
    """Delete the grammars of which no exchange is left."""
    used = f"SELECT 1 FROM exchanges WHERE {_KEY} = hash AND constrained IS NOT NULL"
    db.execute(f"DELETE FROM grammars WHERE NOT EXISTS ({used})")


TokenArray = NDArray[np.uint32]
T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
"""A row of the table `exchanges`, by column."""

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


def assemble_answers(rows: Iterable[tuple[Any, ...]], ids: Set[str] | None = None) -> dict[str, RecordedAnswer]:
    """Build answers, without constraints, from rows of `COLUMNS`, which must include all their ancestors. With `ids`
    only these."""
    return assemble([dict(zip(COLUMNS, row, strict=True)) for row in rows], _to_answer, ids)


def assemble(rows: Iterable[Row], build: Callable[[list[Row]], T], ids: Set[str] | None = None) -> dict[str, T]:
    """Build what rows of exchanges hold. `build` takes the row of an exchange after those that it continues, oldest
    first, all of which must be among `rows`."""
    by_id = {row["id"]: row for row in rows}
    built = {}
    for exchange_id in by_id if ids is None else by_id.keys() & ids:
        chain = [by_id[exchange_id]]
        while (parent := chain[-1]["parent_id"]) is not None:
            chain.append(by_id[parent])
        built[exchange_id] = build(chain[::-1])
    return built


def _to_answer(chain: list[Row]) -> RecordedAnswer:
    *before, row = chain
    prompt = [part for link in before for part in (link["prompt_tail"], link["completion"])]
    return RecordedAnswer(
        **{name: row[name] for name in _PLAIN},
        prompt_token_ids=np.frombuffer(b"".join([*prompt, row["prompt_tail"]]), dtype=np.uint32),
        completion_token_ids=np.frombuffer(row["completion"], dtype=np.uint32),
        sampling_logprobs=np.frombuffer(row["logprobs"], dtype=np.float64),
        has_tools=chain[0]["tools"] not in (None, b"[]"),
        texts=tuple(text for link in chain for text in (link["new_messages"], link["message"])),
        segments=unpack_segments(row["segments"]),
    )
