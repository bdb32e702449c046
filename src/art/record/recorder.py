"""The durable record of every answer: its exact tokens, their log-probs, and the policy that sampled them.

Rows are stored incrementally: an exchange that extends another stores only the tokens and messages that it adds. A
conversation of n turns therefore takes space in proportion to n, not to n squared.

    exchange 1  prompt P1        completion C1
    exchange 2  prompt P1 C1 P2  completion C2     stored: parent = 1, prompt tail = P2

The table `rollouts` has one row per rollout of another program, created by its first exchange or its first `PUT`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import orjson

from art.errors import NotFoundError
from art.protocol.answers import BranchReason, FinishReason
from art.protocol.chat import Message, Tool
from art.protocol.samples import Constraint
from art.record import recorded_answers as columns
from art.record.recorded_answers import RecordedAnswer, Row, Segments, assemble, assemble_answers
from art.record.usage_book import SCHEMA as _USAGE
from art.record.usage_book import Pending, UsageBook, merge_older, write_usage
from art.storage.database import Database, add_columns

_EXCHANGES = """
CREATE TABLE IF NOT EXISTS exchanges (
    id TEXT PRIMARY KEY, rollout_id TEXT, project TEXT NOT NULL, name TEXT NOT NULL, policy_version INTEGER NOT NULL,
    parent_id TEXT, branch_reason TEXT, conversation BLOB NOT NULL,
    prompt_tail BLOB NOT NULL, completion BLOB NOT NULL, logprobs BLOB NOT NULL,
    temperature REAL NOT NULL, top_p REAL NOT NULL, seed INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    new_messages BLOB NOT NULL, tools BLOB, message BLOB NOT NULL, created_at REAL NOT NULL, constrained TEXT,
    segments TEXT, number INTEGER NOT NULL DEFAULT 0, alternatives BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS exchanges_by_conversation ON exchanges (conversation);
CREATE INDEX IF NOT EXISTS exchanges_by_rollout ON exchanges (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS exchanges_by_parent ON exchanges (parent_id) WHERE parent_id IS NOT NULL;
"""


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables that are missing, and add the columns that came later."""
    db.executescript(_EXCHANGES + _ROLLOUTS + _USAGE + columns.GRAMMARS)
    for table, later in _LATER.items():
        add_columns(db, table, later)
    db.execute(columns.GRAMMAR_INDEX)
    db.execute("CREATE INDEX IF NOT EXISTS exchanges_by_number ON exchanges (number)")
    merge_older(db)


_LATER = {
    "exchanges": ("constrained TEXT", "segments TEXT", "number INTEGER NOT NULL DEFAULT 0", "alternatives BLOB"),
    "rollouts": ("untrainable TEXT", "sampling BLOB"),
}
"""Columns that tables of older versions lack."""
_ROLLOUTS = """
CREATE TABLE IF NOT EXISTS rollouts (
    project TEXT NOT NULL, id TEXT NOT NULL, created_at REAL NOT NULL, change INTEGER NOT NULL,
    model TEXT, group_id TEXT, scenario_id TEXT, reward REAL, outcome TEXT, error TEXT,
    metrics BLOB NOT NULL, metadata BLOB NOT NULL, trained_by TEXT, untrainable TEXT, sampling BLOB,
    PRIMARY KEY (project, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollouts_by_id ON rollouts (id);
CREATE INDEX IF NOT EXISTS rollouts_by_change ON rollouts (change);
"""


class RolloutRow(NamedTuple):
    """A row of the table of rollouts, with its columns in order."""

    project: str
    id: str
    created_at: float
    change: int
    """Time of the last change in microseconds since the epoch, increased where needed to be unique and increasing."""
    model: str | None = None
    group_id: str | None = None
    scenario_id: str | None = None
    reward: float | None = None
    outcome: str | None = None
    error: str | None = None
    metrics: bytes = b"{}"
    metadata: bytes = b"{}"
    trained_by: str | None = None
    untrainable: str | None = None
    sampling: bytes | None = None


ROLLOUT_COLUMNS = ", ".join(RolloutRow._fields)
_VALUES = ", ".join("?" * len(RolloutRow._fields))
UPSERT_ROLLOUT = f"INSERT OR REPLACE INTO rollouts ({ROLLOUT_COLUMNS}) VALUES ({_VALUES})"
_NOTE_EXCHANGE = f"""
INSERT INTO rollouts ({ROLLOUT_COLUMNS}) VALUES ({_VALUES})
ON CONFLICT (project, id) DO UPDATE SET model = excluded.model, change = excluded.change WHERE model IS NULL
"""


def next_change(db: sqlite3.Connection) -> int:
    newest = db.execute("SELECT max(change) FROM rollouts").fetchone()[0]
    return max(time.time_ns() // 1000, (newest or 0) + 1)


MAX_RECENT_TOKENS = 1_500_000
"""Tokens of exchanges that are kept in memory, at up to 36 bytes each: some 6,000 short ones, or the last turns of 50
rollouts of 30,000 tokens."""
_TOKENS_PER_EXCHANGE = 200
"""What the texts and objects of an exchange count as."""


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
    alternatives: bytes | None = None
    """The most likely tokens at each place, if `record_alternatives` asks for them; see `unpack_alternatives`."""

    def summary(self) -> dict[str, Any]:
        """Return the facts that a choice names under `exchange`, so that logs have them without this record."""
        return {
            "policy_version": self.policy_version, "started_at": exchange_time(self.id), "ended_at": self.created_at,
            "prompt_tokens": len(self.prompt_token_ids), "completion_tokens": len(self.completion_token_ids),
            **({"segments": self.segments} if self.segments else {}),
        }  # fmt: skip


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
    "finish_reason", "created_at", "alternatives",
)  # fmt: skip
"""Columns that hold a field of `Exchange` as it is."""
_NAMES = (
    *_PLAIN, "conversation", "prompt_tail", "completion", "logprobs", "seed", "new_messages", "tools", "message",
    "constrained", "segments",
)  # fmt: skip
_COLUMNS = ", ".join(_NAMES)

_INSERT = (
    f"INSERT INTO exchanges ({_COLUMNS}, number) VALUES ({', '.join(f':{name}' for name in _NAMES)}, "
    "(SELECT coalesce(max(number), 0) + 1 FROM exchanges))"
)
OLDEST_FIRST, _NEWEST_FIRST = "number, id", "number DESC, id DESC"
"""Order of exchanges in SQL. The number counts them as they are stored; those of older versions all have 0."""
_WITH_ANCESTORS = """
WITH RECURSIVE chain(id) AS (
    SELECT value FROM json_each(?)
    UNION SELECT parent_id FROM exchanges JOIN chain USING (id) WHERE parent_id IS NOT NULL
)
SELECT {columns} FROM exchanges JOIN chain USING (id)
"""
_SELECT_WITH_ANCESTORS = _WITH_ANCESTORS.format(columns=_COLUMNS)
SELECT_ANSWERS = _WITH_ANCESTORS.format(columns=", ".join(columns.COLUMNS))
"""Query of exchanges and all their ancestors, for `assemble_answers`. Its parameter is a JSON list of ids."""
_SELECT_ANSWERS_ONLY = _WITH_ANCESTORS.format(
    columns=", ".join("NULL" if name in columns.TEXTS else name for name in columns.COLUMNS)
)


T = TypeVar("T", Exchange, RecordedAnswer)


class RecentExchanges:
    """The newest exchanges, so that the next turn of a rollout needs no query.

    Many rollouts begin with equal turns, and the database would have to sort all of them. It is read in threads, too.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Exchange, bytes]] = {}  # with the hash of the conversation, oldest first
        self.latest: dict[tuple[bytes, str | None], Exchange] = {}  # by conversation and rollout
        self._num_tokens = 0

    def add(self, exchange: Exchange, conversation: bytes) -> None:
        self.by_id[exchange.id] = exchange, conversation
        self.latest[conversation, exchange.rollout_id] = exchange
        self._num_tokens += _size(exchange)
        while self._num_tokens > MAX_RECENT_TOKENS and len(self.by_id) > 1:
            old, ended = self.by_id.pop(next(iter(self.by_id)))
            self._num_tokens -= _size(old)
            if self.latest.get((ended, old.rollout_id)) is old:
                del self.latest[ended, old.rollout_id]

    def clear(self) -> None:
        self.by_id, self.latest, self._num_tokens = {}, {}, 0


def _size(exchange: Exchange) -> int:
    return len(exchange.prompt_token_ids) + len(exchange.completion_token_ids) + _TOKENS_PER_EXCHANGE


class Recorder:
    """Stores and finds exchanges (requests and answers). Rows that come during a commit are written by the next one."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.usage = UsageBook(database)
        """What each project has used. It is stored with the exchanges."""
        self.recent = RecentExchanges()
        self._pending: list[Row] = []
        self._commit: asyncio.Task[None] | None = None
        self._next_commit: asyncio.Task[None] | None = None
        self._committed_at = 0.0
        """When the newest commit began, by the clock of the event loop."""

    async def start(self) -> None:
        """Create the tables of the record in the database if they are missing."""
        await self.database.run(create_tables)

    async def check(self) -> None:
        """Record an exchange and take it back within one transaction, to see whether answers can be recorded. Raises
        `DiskFullError`, `StorageError` if they cannot."""

        def write_and_undo(db: sqlite3.Connection) -> None:
            db.execute("SAVEPOINT before_check")
            _insert(db, [_to_row(_SAMPLE, b"", None)], {})
            db.execute("ROLLBACK TO before_check")

        await self.database.run(write_and_undo)

    async def append(self, exchange: Exchange, *, conversation: bytes, parent: Exchange | None = None) -> None:
        """Store an exchange. Returns once it is on the disk, so that it survives the death of this process and a power
        cut. Exchanges that are stored together share one sync. After an error (`DiskFullError`, `StorageError`) nothing
        was stored, so the answer must not be sent.

        Args:
            conversation: hash of the request and the answer, by which a later turn finds the exchange.
            parent: the exchange that `parent_id` names.
        """
        self._pending.append(_to_row(exchange, conversation, parent))
        if self._next_commit is None:
            self._next_commit = asyncio.get_running_loop().create_task(self._commit_pending(self._commit))
        # The commit is shared: cancelling one request must not cancel it.
        await asyncio.shield(self._next_commit)
        self.recent.add(exchange, conversation)

    def get(self, ids: Iterable[str]) -> list[Exchange]:
        """Return exchanges, in the order of `ids`. Raises `NotFoundError` if an id is not recorded."""
        ids = list(ids)
        exchanges = self.find(ids)
        _check_complete(ids, exchanges)
        return [exchanges[i] for i in ids]

    def find(self, ids: Iterable[str]) -> dict[str, Exchange]:
        """Return the recorded exchanges among `ids`, by id."""

        def build(rows: list[Any], wanted: set[str]) -> dict[str, Exchange]:
            records = [dict(zip(_NAMES, row, strict=True)) for row in rows]
            for record in records:
                record |= {name: orjson.loads(record[name]) for name in ("new_messages", "message")}
            return assemble(records, _to_exchange, wanted)

        return self._find(ids, _SELECT_WITH_ANCESTORS, build, _NAMES.index("constrained"))

    def find_missing(self, ids: Iterable[str], project: str) -> list[str]:
        """Return those of `ids` that no recorded exchange of a project has."""
        known = "SELECT 1 FROM exchanges WHERE id = value AND project = ?"
        sql = f"SELECT value FROM json_each(?) WHERE NOT EXISTS ({known})"
        return [row[0] for row in self.database.read(sql, (orjson.dumps(sorted(set(ids))).decode(), project))]

    def get_answers(self, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
        """Return exchanges by id, in the form that training reads, without their messages. Raises `NotFoundError` if an
        id is not recorded."""
        ids = list(ids)
        answers = self._find(ids, _SELECT_ANSWERS_ONLY, assemble_answers, -1)
        _check_complete(ids, answers)
        return answers

    def find_answers(self, ids: Iterable[str]) -> dict[str, RecordedAnswer]:
        """Return the recorded exchanges among `ids`, by id, in the form that training reads."""
        return self._find(ids, SELECT_ANSWERS, assemble_answers, -1)

    def _find(
        self, ids: Iterable[str], select: str, build: Callable[[list[Any], set[str]], dict[str, T]], constrained: int
    ) -> dict[str, T]:
        """Find exchanges with `select`, build them, and add their constraints, which are in column `constrained`."""
        unique_ids = set(ids)
        if not unique_ids:
            return {}
        rows = self.database.read(select, (orjson.dumps(sorted(unique_ids)).decode(),))
        built = build(rows, unique_ids)
        packed = {row[0]: row[constrained] for row in rows if row[constrained] and row[0] in built}
        keys = columns.grammar_hashes(packed.values())
        sql = "SELECT hash, text FROM grammars WHERE hash IN (SELECT value FROM json_each(?))"
        grammars = {key: text for key, text in self.database.read(sql, (orjson.dumps(keys).decode(),))} if keys else {}
        for exchange_id, value in packed.items():
            constraint = columns.unpack_constraint(value, grammars)
            built[exchange_id] = replace(built[exchange_id], constraint=constraint)
        return built

    def by_rollout(self, rollout_id: str, project: str) -> list[Exchange]:
        """Return the exchanges of a rollout with models of a project, oldest first. Raises `NotFoundError` if nothing
        is recorded under the rollout id."""
        sql = f"SELECT id FROM exchanges WHERE rollout_id = ? AND project = ? ORDER BY {OLDEST_FIRST}"
        rows = self.database.read(sql, (rollout_id, project))
        if not rows:
            raise NotFoundError(f"no exchange is recorded under rollout {rollout_id!r}", param="rollout_id")
        return self.get(row[0] for row in rows)

    def newest_of_rollout(self, rollout_id: str) -> str | None:
        """The id of the newest exchange of a rollout."""
        sql = f"SELECT id FROM exchanges WHERE rollout_id = ? ORDER BY {_NEWEST_FIRST} LIMIT 1"
        return next((str(row[0]) for row in self.database.read(sql, (rollout_id,))), None)

    def by_conversation(self, conversation: bytes, rollout_id: str | None) -> Exchange | None:
        """Return the latest exchange that ended the conversation with a hash, preferably one of the rollout."""
        if (recent := self.recent.latest.get((conversation, rollout_id))) is not None:
            return recent
        order = f"rollout_id IS ? DESC, {_NEWEST_FIRST}"
        sql = f"SELECT id FROM exchanges WHERE conversation = ? ORDER BY {order} LIMIT 1"
        rows = self.database.read(sql, (conversation, rollout_id))
        return self.get([rows[0][0]])[0] if rows else None

    def find_ended(self, exchange_id: str) -> tuple[Exchange, bytes] | None:
        """Return an exchange and the hash of the conversation that it ended; `None` if it is not recorded."""
        if (recent := self.recent.by_id.get(exchange_id)) is not None:
            return recent
        rows = self.database.read("SELECT conversation FROM exchanges WHERE id = ?", (exchange_id,))
        exchange = self.find([exchange_id]).get(exchange_id) if rows else None
        return None if exchange is None else (exchange, rows[0][0])

    async def _commit_pending(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        loop = asyncio.get_running_loop()
        if (early_s := self._committed_at + COMMIT_EVERY_S - loop.time()) > 0:
            await asyncio.sleep(early_s)
        self._committed_at = loop.time()
        rows, self._pending = self._pending, []
        usage = self.usage.take_pending()
        self._commit, self._next_commit = self._next_commit, None
        try:
            await self.database.run(lambda db: _insert(db, rows, usage))
        except Exception:  # the answers are not sent, but their tokens were sampled
            self.usage.keep_pending(usage)
            raise


def _check_complete(ids: list[str], recorded: Mapping[str, object]) -> None:
    if missing := [i for i in ids if i not in recorded]:
        problem = f"{len(missing)} of {len(ids)} exchanges are not recorded on this server, e.g. {missing[0]!r}"
        raise NotFoundError(problem)


def _insert(db: sqlite3.Connection, rows: list[Row], usage: Pending) -> None:
    for row in rows:  # here rather than in `_to_row`, because sets of kept tokens may be large: this is another thread
        row["constrained"] = columns.pack_constraint(db, row["constrained"])
    db.executemany(_INSERT, rows)
    write_usage(db, usage)
    # Rollouts that make their first exchange get a row. The first model that answers becomes their model.
    speakers = dict.fromkeys((row["project"], row["rollout_id"], row["name"]) for row in rows if row["rollout_id"])
    for project, rollout_id, name in speakers:
        rollout = RolloutRow(project, rollout_id, time.time(), next_change(db), model=f"{project}/{name}")
        db.execute(_NOTE_EXCHANGE, rollout)


def _to_row(exchange: Exchange, conversation: bytes, parent: Exchange | None) -> Row:
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
        "segments": columns.pack_segments(exchange.segments),
    }


def _to_exchange(chain: list[Row]) -> Exchange:
    """Build an exchange from its row, the last one of `chain`, after the rows of those that it continues."""
    row, tools = chain[-1], chain[0]["tools"]
    prompt, messages = bytearray(), list[Message]()
    for link in chain:
        prompt += link["prompt_tail"] if link is row else link["prompt_tail"] + link["completion"]
        messages += link["new_messages"] if link is row else [*link["new_messages"], link["message"]]
    return Exchange(
        **{name: row[name] for name in _PLAIN}, prompt_token_ids=array("I", bytes(prompt)).tolist(),
        completion_token_ids=array("I", row["completion"]).tolist(),
        sampling_logprobs=array("d", row["logprobs"]).tolist(), seed=row["seed"] & (1 << 64) - 1,
        message=row["message"], request_messages=messages, tools=None if tools is None else orjson.loads(tools),
        segments=columns.unpack_segments(row["segments"]),
    )  # fmt: skip
