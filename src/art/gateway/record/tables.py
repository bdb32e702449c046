"""The tables of the record: exchanges, rollouts, deleted responses; and the columns that older databases lack.

The table `rollouts` has one row per rollout of another program, created by its first exchange or its first `PUT`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from typing import NamedTuple

from art.gateway.record import constraints
from art.gateway.record.usage_book import SCHEMA as _USAGE
from art.gateway.record.usage_book import add_keys
from art.storage.database import Database

_EXCHANGES = """
CREATE TABLE IF NOT EXISTS exchanges (
    id TEXT PRIMARY KEY, rollout_id TEXT, project TEXT NOT NULL, name TEXT NOT NULL, policy_version INTEGER NOT NULL,
    parent_id TEXT, branch_reason TEXT, conversation BLOB NOT NULL,
    prompt_tail BLOB NOT NULL, completion BLOB NOT NULL, logprobs BLOB NOT NULL,
    temperature REAL NOT NULL, top_p REAL NOT NULL, seed INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    new_messages BLOB NOT NULL, tools BLOB, message BLOB NOT NULL, created_at REAL NOT NULL, constrained TEXT,
    segments TEXT, number INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS exchanges_by_conversation ON exchanges (conversation);
CREATE INDEX IF NOT EXISTS exchanges_by_rollout ON exchanges (rollout_id) WHERE rollout_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS exchanges_by_parent ON exchanges (parent_id) WHERE parent_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS token_counts (
    project TEXT NOT NULL, name TEXT NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL,
    completion INTEGER NOT NULL, PRIMARY KEY (project, name)
) WITHOUT ROWID;
"""


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables that are missing, and add the columns that came later."""
    db.executescript(_EXCHANGES + _DELETED + _USAGE + constraints.SCHEMA)
    constraints.add_column(db)
    present = {row[1] for row in db.execute("PRAGMA table_info(exchanges)")}
    for column, definition in (("segments", "TEXT"), ("number", "INTEGER NOT NULL DEFAULT 0")):
        if column not in present:
            db.execute(f"ALTER TABLE exchanges ADD COLUMN {column} {definition}")
    db.execute("CREATE INDEX IF NOT EXISTS exchanges_by_number ON exchanges (number)")
    create_table(db)
    add_keys(db)


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


COLUMNS = ", ".join(RolloutRow._fields)
_VALUES = ", ".join("?" * len(RolloutRow._fields))
_UPSERT = f"INSERT OR REPLACE INTO rollouts ({COLUMNS}) VALUES ({_VALUES})"
_NOTE_EXCHANGE = f"""
INSERT INTO rollouts ({COLUMNS}) VALUES ({_VALUES})
ON CONFLICT (project, id) DO UPDATE SET model = excluded.model, change = excluded.change WHERE model IS NULL
"""


def create_table(db: sqlite3.Connection) -> None:
    """Create the table, or add the columns that one of an older version lacks."""
    db.executescript(_ROLLOUTS)
    known = {row[1] for row in db.execute("PRAGMA table_info(rollouts)")}
    for name, kind in (("untrainable", "TEXT"), ("sampling", "BLOB")):
        if name not in known:
            db.execute(f"ALTER TABLE rollouts ADD COLUMN {name} {kind}")


def next_change(db: sqlite3.Connection) -> int:
    newest = db.execute("SELECT max(change) FROM rollouts").fetchone()[0]
    return max(time.time_ns() // 1000, (newest or 0) + 1)


def write_row(db: sqlite3.Connection, row: RolloutRow) -> None:
    """Write the row of a rollout, and set its `change` to now."""
    db.execute(_UPSERT, row._replace(change=next_change(db)))


def note_exchanges(db: sqlite3.Connection, speakers: Iterable[tuple[str, str, str]]) -> None:
    """Create rows for rollouts that make their first exchange. The first model that answers becomes their model.

    Args:
        speakers: project, rollout id and `project/name` of the model that answered, for each exchange.
    """
    for project, rollout_id, model in dict.fromkeys(speakers):
        db.execute(_NOTE_EXCHANGE, RolloutRow(project, rollout_id, time.time(), next_change(db), model=model))


_DELETED = "CREATE TABLE IF NOT EXISTS deleted_responses (exchange_id TEXT PRIMARY KEY) WITHOUT ROWID;\n"


class DeletedResponses:
    """Remembers by their exchanges the responses that a client has deleted: they cannot be read or continued by id.

    The exchanges stay in the record until it forgets them, because a later answer may extend their tokens, and a reward
    may still come for them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def has(self, exchange_id: str) -> bool:
        return bool(self._database.read("SELECT 1 FROM deleted_responses WHERE exchange_id = ?", (exchange_id,)))

    async def add(self, exchange_id: str) -> None:
        sql = "INSERT OR IGNORE INTO deleted_responses VALUES (?)"
        await self._database.run(lambda db: db.execute(sql, (exchange_id,)))
