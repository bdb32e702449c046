"""Responses that a client has deleted. They can no longer be read or continued by their id.

Their exchanges stay in the record until it forgets them, because a later answer may extend their tokens, and a reward
may still come for them.
"""

from __future__ import annotations

from art.storage.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS deleted_responses (exchange_id TEXT PRIMARY KEY) WITHOUT ROWID;\n"


class DeletedResponses:
    """Remembers deleted responses by the ids of their exchanges."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def has(self, exchange_id: str) -> bool:
        return bool(self._database.read("SELECT 1 FROM deleted_responses WHERE exchange_id = ?", (exchange_id,)))

    async def add(self, exchange_id: str) -> None:
        sql = "INSERT OR IGNORE INTO deleted_responses VALUES (?)"
        await self._database.run(lambda db: db.execute(sql, (exchange_id,)))
