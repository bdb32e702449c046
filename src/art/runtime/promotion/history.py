"""The history of promotions in SQLite: every decision about a model's promoted checkpoint, refusals included."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from art.protocol.organisation.promotions import Decision, PromotionRecord, Verdict
from art.runtime.registry import set_promoted
from art.storage.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS promotions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL,
    step INTEGER NOT NULL, previous_step INTEGER, decision TEXT NOT NULL, key_id TEXT NOT NULL, note TEXT NOT NULL,
    verdict TEXT, evidence TEXT
);
CREATE INDEX IF NOT EXISTS promotions_of_model ON promotions (project, name, number);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDecision:
    """A decision that is to be recorded."""

    step: int
    previous_step: int | None
    decision: Decision
    key_id: str
    note: str
    verdict: Verdict | None
    evidence: str | None
    """Hash of the compared values; the same evidence is not another look. `None` if nothing could be compared."""


class PromotionStore:
    """Stores decisions about promotions. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    async def add(self, project: str, name: str, new: NewDecision) -> None:
        """Record a decision. Unless it is a refusal, its step becomes the promoted one in the same transaction."""
        now = time.time()
        row = (
            project, name, now, new.step, new.previous_step, new.decision, new.key_id, new.note,
            None if new.verdict is None else new.verdict.model_dump_json(), new.evidence,
        )  # fmt: skip

        def insert(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO promotions (project, name, at, step, previous_step, decision, key_id, note, verdict, "
                f"evidence) VALUES ({', '.join('?' * len(row))})",
                row,
            )
            if new.decision != "refused":
                set_promoted(db, project, name, new.step, now)

        await self._database.run(insert)

    async def records(self, project: str, name: str) -> list[PromotionRecord]:
        """Return the decisions about a model, oldest first."""
        rows = await self._read(
            "SELECT number, at, step, previous_step, decision, key_id, note, verdict FROM promotions "
            "WHERE project = ? AND name = ? ORDER BY number",
            project,
            name,
        )
        return [
            PromotionRecord(
                number=number, at=at, step=step, previous_step=previous, decision=decision, key_id=key_id, note=note,
                verdict=None if verdict is None else Verdict.model_validate_json(verdict),
            )
            for number, at, step, previous, decision, key_id, note, verdict in rows
        ]  # fmt: skip

    async def refused_evidence(self, project: str, name: str) -> set[str]:
        """Return the hashes of the evidence that was refused since a checkpoint was last promoted."""
        rows = await self._read(
            "SELECT evidence FROM promotions WHERE project = ?1 AND name = ?2 AND decision = 'refused' AND number > "
            "coalesce((SELECT max(number) FROM promotions WHERE project = ?1 AND name = ?2 AND decision != 'refused'), "
            "0)",
            project,
            name,
        )
        return {evidence for (evidence,) in rows if evidence is not None}

    async def _read(self, sql: str, project: str, name: str) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._database.read, sql, (project, name))
