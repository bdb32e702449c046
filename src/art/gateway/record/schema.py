"""The tables of the record in the database, and the columns that older databases lack."""

from __future__ import annotations

import sqlite3

from art.gateway.record import constraints
from art.gateway.record.deleted_responses import SCHEMA as _DELETED_SCHEMA
from art.gateway.record.rollout_table import create_table
from art.gateway.record.usage_book import SCHEMA as _USAGE_SCHEMA
from art.gateway.record.usage_book import add_keys

_SCHEMA = """
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
    db.executescript(_SCHEMA + _DELETED_SCHEMA + _USAGE_SCHEMA + constraints.SCHEMA)
    constraints.add_column(db)
    present = {row[1] for row in db.execute("PRAGMA table_info(exchanges)")}
    for column, definition in (("segments", "TEXT"), ("number", "INTEGER NOT NULL DEFAULT 0")):
        if column not in present:
            db.execute(f"ALTER TABLE exchanges ADD COLUMN {column} {definition}")
    db.execute("CREATE INDEX IF NOT EXISTS exchanges_by_number ON exchanges (number)")
    create_table(db)
    add_keys(db)
