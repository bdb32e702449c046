"""The table of answers that training steps have learnt from. It shows whether a step repeats earlier ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import orjson

from art.gateway.record.recorder import exchange_id_at

SCHEMA = """
CREATE TABLE IF NOT EXISTS trained_exchanges (exchange_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
"""


def note_trained(db: sqlite3.Connection, exchange_ids: Sequence[str], step: int) -> None:
    """Note that the step which made checkpoint `step` learnt from these answers."""
    db.executemany("INSERT OR REPLACE INTO trained_exchanges VALUES (?, ?)", [(each, step) for each in exchange_ids])


def repeated_step(db: sqlite3.Connection, exchange_ids: Sequence[str]) -> int | None:
    """The newest step that learnt from one of these answers, if all of them were learnt from before; else `None`."""
    sql = "SELECT count(*), max(step) FROM trained_exchanges WHERE exchange_id IN (SELECT value FROM json_each(?))"
    ((count, step),) = db.execute(sql, (orjson.dumps(list(exchange_ids)).decode(),))
    return step if count == len(exchange_ids) else None


def forget_trained(db: sqlite3.Connection, before: float) -> None:
    """Delete the rows of answers that are older than the Unix time `before`."""
    db.execute("DELETE FROM trained_exchanges WHERE exchange_id < ?", (exchange_id_at(before),))
