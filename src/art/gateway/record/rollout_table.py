"""The table `rollouts`: one row per rollout of another program, created by its first exchange or its first `PUT`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from typing import NamedTuple

_SCHEMA = """
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
    db.executescript(_SCHEMA)
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
