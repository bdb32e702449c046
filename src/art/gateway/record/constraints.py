"""What answers were drawn from, in the database: grammars once each, by hash, and the rest beside each exchange.

grammars     hash (SHA-256) | text | llguidance version
exchanges    constrained: hash of the grammar (32 bytes, zeros for none), then JSON of the rest; NULL for most
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sqlite3
from collections.abc import Iterable, Mapping

import orjson

from art.protocol.samples import Constraint
from art.protocol.token_sets import pack_token_sets, unpack_token_sets

SCHEMA = """
CREATE TABLE IF NOT EXISTS grammars (hash TEXT PRIMARY KEY, text TEXT NOT NULL, version TEXT NOT NULL) WITHOUT ROWID;
"""
_HASH_SIZE = 64
_NO_GRAMMAR = "0" * _HASH_SIZE
_INSERT = "INSERT OR IGNORE INTO grammars VALUES (?, ?, ?)"
_KEY = f"substr(constrained, 1, {_HASH_SIZE})"
_INDEX = f"CREATE INDEX IF NOT EXISTS exchanges_by_grammar ON exchanges ({_KEY}) WHERE constrained IS NOT NULL"
_DELETE_UNUSED = f"""
DELETE FROM grammars WHERE NOT EXISTS (SELECT 1 FROM exchanges WHERE {_KEY} = hash AND constrained IS NOT NULL)
"""


def add_column(db: sqlite3.Connection) -> None:
    """Add the column to a database that was made before the column existed, and its index."""
    if "constrained" not in {row[1] for row in db.execute("PRAGMA table_info(exchanges)")}:
        db.execute("ALTER TABLE exchanges ADD COLUMN constrained TEXT")
    db.execute(_INDEX)


def store(db: sqlite3.Connection, constraint: Constraint | None) -> str | None:
    """Store a constraint's grammar, and return the value of its exchange's column."""
    if constraint is None:
        return None
    key = _NO_GRAMMAR
    if constraint.grammar is not None:
        key = hashlib.sha256(constraint.grammar.encode()).hexdigest()
        db.execute(_INSERT, (key, constraint.grammar, importlib.metadata.version("llguidance")))
    kept = None if constraint.kept is None else pack_token_sets(constraint.kept)
    return key + orjson.dumps({"stop_token_ids": constraint.stop_token_ids, "kept": kept}).decode()


def load(value: str, grammars: Mapping[str, str]) -> Constraint:
    """Read the value of an exchange's column. `grammars` has the texts by hash."""
    key, rest = value[:_HASH_SIZE], orjson.loads(value[_HASH_SIZE:])
    return Constraint(
        grammar=None if key == _NO_GRAMMAR else grammars[key],
        stop_token_ids=rest["stop_token_ids"],
        kept=None if rest["kept"] is None else unpack_token_sets(rest["kept"]),
    )


def hashes(values: Iterable[str]) -> list[str]:
    """Hashes of the grammars that values of the column name."""
    return sorted({value[:_HASH_SIZE] for value in values} - {_NO_GRAMMAR})


def delete_unused(db: sqlite3.Connection) -> int:
    """Delete the grammars of which no exchange is left; returns how many."""
    return db.execute(_DELETE_UNUSED).rowcount
