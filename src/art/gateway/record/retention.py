"""Delete old exchanges (recorded requests and answers) and rollouts, so that the record does not grow for ever.

An exchange that a newer one continues is kept as long as that one, which stores only the tokens that it adds.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence

import orjson

from art.errors import StorageError
from art.gateway.record.conversations import Conversations
from art.gateway.record.recorder import Recorder, exchange_id_at

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
_BATCH = 500
"""Rows deleted per transaction. A request that is waiting to be recorded waits for at most one."""
_DELETE_EXCHANGES = """
DELETE FROM exchanges WHERE id IN (
    SELECT id FROM exchanges AS old WHERE id < ?
        AND NOT EXISTS (SELECT 1 FROM exchanges AS next WHERE next.parent_id = old.id)
        AND id NOT IN (SELECT value FROM json_each(?))
    LIMIT ?)
"""
_DELETE_ROLLOUTS = """
DELETE FROM rollouts WHERE (project, id) IN (
    SELECT project, id FROM rollouts WHERE change < ?
        AND NOT EXISTS (SELECT 1 FROM exchanges WHERE rollout_id = rollouts.id AND project = rollouts.project)
    LIMIT ?)
"""


Needed = Callable[[sqlite3.Connection], Sequence[str]]
"""Function that returns the ids of exchanges to keep at any age. It runs in the transaction that deletes."""


async def forget_older(
    recorder: Recorder, conversations: Conversations, age_s: float, needed: Needed
) -> tuple[int, int]:
    """Delete exchanges and rollouts that are older than `age_s` seconds; returns how many of each."""
    before = time.time() - age_s
    conversations.forget_before(exchange_id_at(before))

    def delete_exchanges(db: sqlite3.Connection) -> int:
        kept = orjson.dumps(list(needed(db))).decode()
        return db.execute(_DELETE_EXCHANGES, (exchange_id_at(before), kept, _BATCH)).rowcount

    def delete_rollouts(db: sqlite3.Connection) -> int:
        return db.execute(_DELETE_ROLLOUTS, (int(before * 1e6), _BATCH)).rowcount

    return await _repeat(recorder, delete_exchanges), await _repeat(recorder, delete_rollouts)


async def forget_regularly(recorder: Recorder, conversations: Conversations, age_s: float, needed: Needed) -> None:
    """Run `forget_older` now and every `INTERVAL_S` seconds, until cancelled."""
    while True:
        try:
            exchanges, rollouts = await forget_older(recorder, conversations, age_s, needed)
            if exchanges or rollouts:
                logger.info("deleted %d exchanges and %d rollouts older than %g s", exchanges, rollouts, age_s)
        except StorageError as error:
            logger.warning("old exchanges could not be deleted; trying again in an hour: %s", error)
        await asyncio.sleep(INTERVAL_S)


async def _repeat(recorder: Recorder, delete: Callable[[sqlite3.Connection], int]) -> int:
    """Run `delete` in one transaction after another until it deletes nothing."""
    total = 0
    while deleted := await recorder.database.run(delete):
        total += deleted
    return total
