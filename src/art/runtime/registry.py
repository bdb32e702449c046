"""Registered models, in SQLite. What is written here survives `kill -9`."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import dataclass

from art.config import ModelSettings
from art.storage.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    project TEXT NOT NULL, name TEXT NOT NULL, base_model TEXT NOT NULL, settings TEXT NOT NULL,
    step INTEGER NOT NULL DEFAULT 0, created_at REAL NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE IF NOT EXISTS published (
    project TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, identity TEXT NOT NULL,
    PRIMARY KEY (project, name, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS promoted (
    project TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, promoted_at REAL NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    project: str
    name: str
    base_model: str
    settings: ModelSettings
    step: int
    """Step of the newest published checkpoint."""

    created_at: float = 0.0
    """When the model was first registered, in seconds since the epoch."""
    promoted_step: int | None = None
    """Step of the checkpoint that `project/name@promoted` means; `None` while nothing is promoted."""

    @property
    def key(self) -> str:
        return f"{self.project}/{self.name}"

    def adapter_id(self, step: int) -> str:
        return f"{self.key}@{step}"


class Registry:
    """Stores the registered models; every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    async def models(self) -> list[RegisteredModel]:
        sql = (
            "SELECT project, name, base_model, settings, models.step, created_at, promoted.step "
            "FROM models LEFT JOIN promoted USING (project, name)"
        )
        rows = await asyncio.to_thread(self._database.read, sql)
        return [
            RegisteredModel(project, name, base_model, ModelSettings.model_validate_json(settings), *others)
            for project, name, base_model, settings, *others in rows
        ]

    def identity(self, model: RegisteredModel, step: int) -> str | None:
        """The identity of a published checkpoint; `None` if a server published it that did not record identities."""
        sql = "SELECT identity FROM published WHERE project = ? AND name = ? AND step = ?"
        rows = self._database.read(sql, (model.project, model.name, step))
        return str(rows[0][0]) if rows else None

    async def save_identity(self, model: RegisteredModel, step: int, identity: str) -> None:
        await self._database.run(lambda db: set_identity(db, model.project, model.name, step, identity))

    async def save_model(self, model: RegisteredModel) -> None:
        """Insert a model, or update everything but its step and what is promoted."""
        row = (
            model.project,
            model.name,
            model.base_model,
            model.settings.model_dump_json(),
            model.step,
            model.created_at,
        )
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO models (project, name, base_model, settings, step, created_at) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (project, name) DO UPDATE SET base_model = excluded.base_model, settings = "
                "excluded.settings",
                row,
            )
        )


def set_step(db: sqlite3.Connection, project: str, name: str, step: int) -> None:
    """Set the step of a model's newest published checkpoint, within the transaction of `db`."""
    db.execute("UPDATE models SET step = ? WHERE project = ? AND name = ?", (step, project, name))


def set_identity(db: sqlite3.Connection, project: str, name: str, step: int, identity: str) -> None:
    """Record the identity of a published checkpoint, within the transaction of `db`."""
    db.execute("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?)", (project, name, step, identity))


def set_promoted(db: sqlite3.Connection, project: str, name: str, step: int, now: float) -> None:
    """Record `step` as the promoted one in place of any other step of the model, within the transaction of `db`."""
    db.execute("INSERT OR REPLACE INTO promoted VALUES (?, ?, ?, ?)", (project, name, step, now))
