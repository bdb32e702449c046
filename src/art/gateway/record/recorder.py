"""The durable record of every answer: its exact tokens, their log-probs, and the policy that sampled them.

Rows are stored incrementally: an exchange that extends another stores only the tokens and messages that it adds. A
conversation of n turns therefore takes space in proportion to n, not to n squared.

    exchange 1  prompt P1        completion C1
    exchange 2  prompt P1 C1 P2  completion C2     stored: parent = 1, prompt tail = P2
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import orjson

from art.errors import NotFoundError
from art.gateway.format.bridge import BranchReason
from art.gateway.record import constraints
from art.gateway.record.recorded_answers import COLUMNS as ANSWER_COLUMNS
from art.gateway.record.recorded_answers import TEXTS as ANSWER_TEXTS
from art.gateway.record.recorded_answers import (
    RecordedAnswer,
    Segments,
    assemble_answers,
    pack_segments,
    unpack_segments,
)
from art.gateway.record.tables import create_tables, note_exchanges
from art.gateway.record.usage_book import UNKNOWN_KEY, Amounts, Pending, UsageBook, write_usage
from art.protocol.answers import FinishReason
from art.protocol.chat import Message, Tool
from art.protocol.samples import Constraint
from art.storage.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One recorded request and answer. With `n` choices, each is an exchange of its own.

    Example: the second turn of a conversation whose first exchange had prompt P (3 tokens) and completion A (2)
        prompt_token_ids      P P P A A E E E     (E: the new message and the opening of the answer)
        completion_token_ids  B B                 (the token that ended the answer included)
        sampling_logprobs     b b
    """

    id: str
    """Unique over time and servers. It begins with the time by the clock, which may go back: see `OLDEST_FIRST`."""
    rollout_id: str | None
    """The id in the base URL `/rollouts/{rollout_id}/v1`, if the request used one."""
    project: str
    name: str
    policy_version: int
    """Step whose weights sampled the first token. 0 also means the base model: step 0 does not change its weights."""
    parent_id: str | None
    """The exchange whose prompt and completion are, token by token, the beginning of this prompt."""
    branch_reason: BranchReason | None
    """Why a prompt with earlier answers does not extend a recorded one. `None` with a parent, and on a first turn."""
    prompt_token_ids: list[int]  # [P]
    completion_token_ids: list[int]  # [C]
    sampling_logprobs: list[float]  # [C] after temperature and truncation, among the tokens of `constraint`
    temperature: float
    top_p: float
    seed: int
    """Sampling seed of this choice, an unsigned 64-bit number. vLLM draws with it only if the client chose it."""
    finish_reason: FinishReason
    message: Message
    """The answer as it was sent to the client."""
    request_messages: list[Message]
    """The rendered messages, normalised. Earlier answers include the reasoning that was recorded for them."""
    tools: list[Tool] | None
    created_at: float
    """Seconds since the epoch."""
    constraint: Constraint | None = None
    """The part of the vocabulary that the completion was drawn from; `None` for all of it."""
    segments: Segments = field(default_factory=list)
    """Step and number of tokens of each part of the completion, in order, if several steps sampled it; else empty."""

    def summary(self) -> dict[str, Any]:
        """Return the facts that a choice names under `exchange`, so that logs have them without this record."""
        return {
            "policy_version": self.policy_version,
            "started_at": exchange_time(self.id),
            "ended_at": self.created_at,
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": len(self.completion_token_ids),
            **({"segments": self.segments} if self.segments else {}),
        }


COMMIT_EVERY_S = 0.003
"""Shortest time between two commits. Answers that end within it share one, which costs less than one for each."""
_SAMPLE = Exchange(
    id="ex_check", rollout_id="check", project="", name="", policy_version=0, parent_id=None, branch_reason=None,
    prompt_token_ids=[0], completion_token_ids=[0], sampling_logprobs=[0.0], temperature=1.0, top_p=1.0, seed=0,
    finish_reason="stop", message={"role": "assistant", "content": ""}, request_messages=[], tools=None, created_at=0.0,
)  # fmt: skip
"""An exchange that `Recorder.check` writes; it is never stored."""


def new_exchange_id() -> str:
    """Make an id of the microseconds since the epoch and 48 random bits, in hex."""
    return f"ex_{time.time_ns() // 1000:014x}{os.urandom(6).hex()}"


def exchange_time(exchange_id: str) -> float | None:
    """Return when an exchange id was made, in seconds since the epoch; `None` for an id of another form."""
    try:
        return int(exchange_id.removeprefix("ex_")[:14], 16) / 1e6 if exchange_id.startswith("ex_") else None
    except ValueError:
        return None


def exchange_id_at(seconds: float) -> str:
    """Make a text that sorts between the exchange ids from before and from after a time in seconds since the epoch."""
    return f"ex_{int(seconds * 1e6):014x}"


_PLAIN = (
    "id", "rollout_id", "project", "name", "policy_version", "parent_id", "branch_reason", "temperature", "top_p",
    "finish_reason", "created_at",
)  # fmt: skip
"""Columns that hold a field of `Exchange` as it is."""
_NAMES = (
    *_PLAIN, "conversation", "prompt_tail", "completion", "logprobs", "seed", "new_messages", "tools", "message",
    "constrained", "segments",
)  # fmt: skip
_COLUMNS = ", ".join(_NAMES)
_Row: TypeAlias = dict[str, Any]
"""A row of the table `exchanges`, by column."""

_INSERT = (
    f"INSERT INTO exchanges ({_COLUMNS}, number) VALUES ({', '.join(f':{name}' for name in _NAMES)}, "
    "(SELECT coalesce(max(number), 0) + 1 FROM exchanges))"
)
OLDEST_FIRST, _NEWEST_FIRST = "number, id", "number DESC, id DESC"
"""Order of exchanges in SQL. The number counts them as they are stored; those of older versions all have 0."""
_COUNT = """
INSERT INTO token_counts VALUES (?, ?, ?, ?, ?) ON CONFLICT (project, name) DO UPDATE SET
prompt = prompt + excluded.prompt, cached = cached + excluded.cached, completion = completion + excluded.completion
"""
_WITH_ANCESTORS = """
WITH RECURSIVE chain(id) AS (
    SELECT value FROM json_each(?)
    UNION SELECT parent_id FROM exchanges JOIN chain USING (id) WHERE parent_id IS NOT NULL
)
SELECT {columns} FROM exchanges JOIN chain USING (id)
"""
_SELECT_WITH_ANCESTORS = _WITH_ANCESTORS.format(columns=_COLUMNS)
SELECT_ANSWERS = _WITH_ANCESTORS.format(columns=", ".join(ANSWER_COLUMNS))
"""Query of exchanges and all their ancestors, for `assemble_answers`. Its parameter is a JSON list of ids."""
_SELECT_ANSWERS_ONLY = _WITH_ANCESTORS.format(
    columns=", ".join("NULL" if name in ANSWER_TEXTS else name for name in ANSWER_COLUMNS)
)


class Recorder:
    """Stores and finds exchanges (requests and answers). Rows that come during a commit are written by the next one."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.usage = UsageBook(database)
        """What each project has used. It is stored with the exchanges."""
        self._pending: list[_Row] = []
        self._pending_counts: list[tuple[str, str, int, int, int]] = []
        self._commit: asyncio.Task[None] | None = None
        self._next_commit: asyncio.Task[None] | None = None
        self._committed_at = 0.0
        """When the newest commit began, by the clock of the event loop."""

    async def start(self) -> None:
        """Create the tables of the record in the database if they are missing.

        Raises:
            StorageError: the database cannot be written.
        """
        await self.database.run(create_tables)
        await self.usage.start()

    async def check(self) -> None:
        """Record an exchange and take it back within one transaction, to see whether answers can be recorded.

        Raises:
            DiskFullError, StorageError: they cannot.
        """

        def write_and_undo(db: sqlite3.Connection) -> None:
            db.execute("SAVEPOINT before_check")
            _insert(db, [_to_row(_SAMPLE, b"", None)], [("", "", 0, 0, 0)], {})
            db.execute("ROLLBACK TO before_check")

        await self.database.run(write_and_undo)

    async def append(self, exchange: Exchange, *, conversation: bytes, parent: Exchange | None = None) -> None:
        """Store an exchange. Returns once it is on the disk, so that it survives the death of this process and a power
        cut. Exchanges that are stored together share one sync.

        Args:
            conversation: hash of the request and the answer, by which a later turn finds the exchange.
            parent: the exchange that `parent_id` names.

        Raises:
            DiskFullError, StorageError: nothing was stored, so the answer must not be sent.
        """
        self._pending.append(_to_row(exchange, conversation, parent))
        if self._next_commit is None:
            self._next_commit = asyncio.get_running_loop().create_task(self._commit_pending(self._commit))
        # The commit is shared: cancelling one request must not cancel it.
        await asyncio.shield(self._next_commit)

    def count_tokens(
        self, project: str, name: str, *, prompt: int, cached: int, completion: int, key_id: str = UNKNOWN_KEY
    ) -> None:
        """Add to the token counts of a model and of the key that asked, stored with the next exchange. `cached` tokens
        are also part of `prompt`."""
        self._pending_counts.append((project, name, prompt, cached, completion))
        self.usage.add(project, name, Amounts(prompt=prompt, cached=cached, completion=completion), key_id=key_id)

    def token_counts(self, project: str, name: str) -> tuple[int, int, int]:
        """Return the numbers of prompt, cached and completion tokens of a model since it was registered."""
        sql = "SELECT prompt, cached, completion FROM token_counts WHERE project = ? AND name = ?"
        rows = self.database.read(sql, (project, name))
        prompt, cached, completion = rows[0] if rows else (0, 0, 0)
        return prompt, cached, completion

    def get(self, ids: Iterable[str]) -> list[Exchange]:
        """Return exchanges, in the order of `ids`.

        Raises:
            NotFoundError: an id is not recorded.
        """
        ids = list(ids)
        exchanges = self.find(ids)
        _check_complete(ids, exchanges)
        return [exchanges[i] for i in ids]

    def find(self, ids: Iterable[str]) -> dict[str, Exchange]:
        """Return the recorded exchanges among `ids`, by id."""
        unique_ids = set(ids)
        if not unique_ids:
            return {}
        rows = self.database.read(_SELECT_WITH_ANCESTORS, (orjson.dumps(sorted(unique_ids)).decode(),))
        records = [dict(zip(_NAMES, row, strict=True)) for row in rows]
        exchanges = _assemble(records)
        drawn_from = {
            row["id"]: row["constrained"] for row in records if row["constrained"] and row["id"] in unique_ids
        }
        for exchange_id, value in self._constraints(drawn_from).items():
            exchanges[exchange_id] = replace(exchanges[exchange_id], constraint=value)
        return {i: exchanges[i] for i in unique_ids & exchanges.keys()}

    def find_missing(self, ids: Iterable[str], project: str) -> list[str]:
        """Return those of `ids` that no recorded exchange of a project has."""
        sql = (
            "SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM exchanges WHERE id = value AND project = ?)"
        )
        return [row[0] for row in self.database.read(sql, (orjson.dumps(sorted(set(ids))).decode(), project))]

    def get_answers(self, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
        """Return exchanges by id, in the form that training reads, without their messages.

        Raises:
            NotFoundError: an id is not recorded.
        """
        ids = list(ids)
        answers = self._find_answers(ids, _SELECT_ANSWERS_ONLY)
        _check_complete(ids, answers)
        return answers

    def find_answers(self, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
        """Return the recorded exchanges among `ids`, by id, in the form that training reads."""
        return self._find_answers(ids, SELECT_ANSWERS)

    def _find_answers(self, ids: Iterable[str], select: str) -> dict[str, RecordedAnswer]:
        unique_ids = set(ids)
        if not unique_ids:
            return {}
        rows = self.database.read(select, (orjson.dumps(sorted(unique_ids)).decode(),))
        answers = assemble_answers(rows)
        drawn_from = {row[0]: row[-1] for row in rows if row[-1] and row[0] in unique_ids}
        for exchange_id, value in self._constraints(drawn_from).items():
            answers[exchange_id] = replace(answers[exchange_id], constraint=value)
        return {i: answers[i] for i in unique_ids & answers.keys()}

    def _constraints(self, values: dict[str, str]) -> dict[str, Constraint]:
        """Decode values of the column `constrained`, by exchange id."""
        keys = constraints.hashes(values.values())
        sql = "SELECT hash, text FROM grammars WHERE hash IN (SELECT value FROM json_each(?))"
        texts = {key: text for key, text in self.database.read(sql, (orjson.dumps(keys).decode(),))} if keys else {}
        return {exchange_id: constraints.load(value, texts) for exchange_id, value in values.items()}

    def by_rollout(self, rollout_id: str, project: str) -> list[Exchange]:
        """Return the exchanges of a rollout with models of a project, oldest first.

        Raises:
            NotFoundError: nothing is recorded under the rollout id.
        """
        rows = self.database.read(
            f"SELECT id FROM exchanges WHERE rollout_id = ? AND project = ? ORDER BY {OLDEST_FIRST}",
            (rollout_id, project),
        )
        if not rows:
            raise NotFoundError(f"no exchange is recorded under rollout {rollout_id!r}", param="rollout_id")
        return self.get(row[0] for row in rows)

    def newest_of_rollout(self, rollout_id: str) -> str | None:
        """The id of the newest exchange of a rollout."""
        sql = f"SELECT id FROM exchanges WHERE rollout_id = ? ORDER BY {_NEWEST_FIRST} LIMIT 1"
        return next((str(row[0]) for row in self.database.read(sql, (rollout_id,))), None)

    def by_conversation(self, conversation: bytes, rollout_id: str | None) -> Exchange | None:
        """Return the latest exchange that ended the conversation with a hash, preferably one of the rollout."""
        rows = self.database.read(
            f"SELECT id FROM exchanges WHERE conversation = ? ORDER BY rollout_id IS ? DESC, {_NEWEST_FIRST} LIMIT 1",
            (conversation, rollout_id),
        )
        return self.get([rows[0][0]])[0] if rows else None

    def conversation_of(self, exchange_id: str) -> bytes | None:
        rows = self.database.read("SELECT conversation FROM exchanges WHERE id = ?", (exchange_id,))
        return rows[0][0] if rows else None

    async def _commit_pending(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        loop = asyncio.get_running_loop()
        if (early_s := self._committed_at + COMMIT_EVERY_S - loop.time()) > 0:
            await asyncio.sleep(early_s)
        self._committed_at = loop.time()
        rows, self._pending = self._pending, []
        counts, self._pending_counts = self._pending_counts, []
        usage = self.usage.take_pending()
        self._commit, self._next_commit = self._next_commit, None
        try:
            await self.database.run(lambda db: _insert(db, rows, counts, usage))
        except Exception:  # the answers are not sent, but their tokens were sampled
            self._pending_counts = [*counts, *self._pending_counts]
            self.usage.keep_pending(usage)
            raise


def _check_complete(ids: list[str], recorded: Mapping[str, object]) -> None:
    if missing := [i for i in ids if i not in recorded]:
        raise NotFoundError(
            f"{len(missing)} of {len(ids)} exchanges are not recorded on this server, e.g. {missing[0]!r}"
        )


def _insert(
    db: sqlite3.Connection, rows: list[_Row], counts: list[tuple[str, str, int, int, int]], usage: Pending
) -> None:
    for row in rows:  # here rather than in `_to_row`, because sets of kept tokens may be large: this is another thread
        row["constrained"] = constraints.store(db, row["constrained"])
    db.executemany(_INSERT, rows)
    db.executemany(_COUNT, counts)
    write_usage(db, usage)
    names = [(row["project"], row["name"], row["rollout_id"]) for row in rows if row["rollout_id"]]
    note_exchanges(db, [(project, rollout_id, f"{project}/{name}") for project, name, rollout_id in names])


def _to_row(exchange: Exchange, conversation: bytes, parent: Exchange | None) -> _Row:
    prompt, messages, tools = exchange.prompt_token_ids, exchange.request_messages, exchange.tools
    if parent is not None:
        prompt = prompt[len(parent.prompt_token_ids) + len(parent.completion_token_ids) :]
        messages = messages[len(parent.request_messages) + 1 :]
        tools = None  # equal to the parent's, since tools are part of the conversation's hash
    return {
        **{name: getattr(exchange, name) for name in _PLAIN},
        "conversation": conversation,
        "prompt_tail": array("I", prompt).tobytes(),
        "completion": array("I", exchange.completion_token_ids).tobytes(),
        "logprobs": array("d", exchange.sampling_logprobs).tobytes(),
        # SQLite's integers are signed.
        "seed": exchange.seed - (1 << 64) if exchange.seed >= 1 << 63 else exchange.seed,
        "new_messages": orjson.dumps(messages),
        "tools": None if tools is None else orjson.dumps(tools),
        "message": orjson.dumps(exchange.message),
        "constrained": exchange.constraint,
        "segments": pack_segments(exchange.segments),
    }


def _assemble(rows: Iterable[_Row]) -> dict[str, Exchange]:
    """Build exchanges from rows, which must include all their ancestors."""
    by_id = {row["id"]: row for row in rows}
    built: dict[str, Exchange] = {}
    for row in by_id.values():
        chain = []
        missing: _Row | None = row
        while missing is not None and missing["id"] not in built:
            chain.append(missing)
            missing = by_id[missing["parent_id"]] if missing["parent_id"] is not None else None
        for link in reversed(chain):
            parent = None if link["parent_id"] is None else built[link["parent_id"]]
            built[link["id"]] = _to_exchange(link, parent)
    return built


def _to_exchange(row: _Row, parent: Exchange | None) -> Exchange:
    prompt = array("I", row["prompt_tail"]).tolist()
    messages = orjson.loads(row["new_messages"])
    tools = None if row["tools"] is None else orjson.loads(row["tools"])
    if parent is not None:
        prompt = parent.prompt_token_ids + parent.completion_token_ids + prompt
        messages = [*parent.request_messages, parent.message, *messages]
        tools = parent.tools
    return Exchange(
        **{name: row[name] for name in _PLAIN},
        prompt_token_ids=prompt,
        completion_token_ids=array("I", row["completion"]).tolist(),
        sampling_logprobs=array("d", row["logprobs"]).tolist(),
        seed=row["seed"] & (1 << 64) - 1,
        message=orjson.loads(row["message"]),
        request_messages=messages,
        tools=tools,
        segments=unpack_segments(row["segments"]),
    )
