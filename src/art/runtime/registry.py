"""Registered models, in SQLite. What is written here survives `kill -9`."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from art.config import ModelSettings, VllmConfig
from art.config.base import STORED
from art.protocol.checkpoint_calls import MetricsRow
from art.protocol.promotions import PromotionRecord, Verdict
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
CREATE TABLE IF NOT EXISTS promotions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL,
    step INTEGER NOT NULL, previous_step INTEGER, decision TEXT NOT NULL, key_id TEXT NOT NULL, note TEXT NOT NULL,
    verdict TEXT, evidence TEXT
);
CREATE INDEX IF NOT EXISTS promotions_of_model ON promotions (project, name, number);
CREATE TABLE IF NOT EXISTS step_metrics (
    project TEXT NOT NULL, name TEXT NOT NULL, row_id TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (project, name, row_id)
) WITHOUT ROWID;
"""


def host_key(base_model: str, settings: ModelSettings) -> str:
    """Name what engine and trainer are started with."""
    parts = (settings.engine, settings.trainer, settings.render)
    key = "|".join([base_model, *(part.model_dump_json() for part in parts)])
    if isinstance(settings.engine, VllmConfig) and settings.lora is not None:
        key += f"|{settings.lora.rank}"  # vLLM must know the rank of its adapters when it starts
    return key


@dataclass(frozen=True)
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

    @functools.cached_property
    def host_key(self) -> str:
        """Models with the same key share engine and trainer."""
        key, engine = host_key(self.base_model, self.settings), self.settings.engine
        if isinstance(engine, VllmConfig) and engine.weights == "merged":
            key += f"|{self.key}"  # the engine holds one policy, so models cannot share it
        return key

    def adapter_id(self, step: int) -> str:
        return f"{self.key}@{step}"


class Registry:
    """Stores the registered models, what was logged and decided about their checkpoints, and which ones are published
    and promoted. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    def check_file(self) -> None:
        """Raise `DirectoryGoneError` if the database was removed or replaced."""
        self._database.check_file()

    async def models(self) -> list[RegisteredModel]:
        rows = await self._read(
            "SELECT project, name, base_model, settings, models.step, created_at, promoted.step "
            "FROM models LEFT JOIN promoted USING (project, name)"
        )
        return [
            RegisteredModel(project, name, base_model, _read_settings(settings), *others)
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
        settings = model.settings.model_dump_json()
        row = (model.project, model.name, model.base_model, settings, model.step, model.created_at)
        sql = (
            "INSERT INTO models (project, name, base_model, settings, step, created_at) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (project, name) DO UPDATE SET base_model = excluded.base_model, settings = excluded.settings"
        )
        await self._database.run(lambda db: db.execute(sql, row))

    async def add_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        """Store logged metrics, by which the best checkpoint is found. A row that was stored before, by its `row_id`,
        is ignored."""
        finite = {key: value for key, value in row.metrics.items() if math.isfinite(value)}
        values = (project, name, row.row_id, row.step, json.dumps(finite))
        sql = "INSERT OR IGNORE INTO step_metrics VALUES (?, ?, ?, ?, ?)"
        await self._database.run(lambda db: db.execute(sql, values))

    async def mean_metrics(self, project: str, name: str) -> dict[int, dict[str, float]]:
        """Return the mean of each logged metric at each step, over the rows that have the metric."""
        rows = await self._read("SELECT step, metrics FROM step_metrics WHERE project = ? AND name = ?", project, name)
        values: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step, metrics in rows:
            for key, value in json.loads(metrics).items():
                values[step][key].append(value)
        return {step: {key: fmean(items) for key, items in metrics.items()} for step, metrics in values.items()}

    async def add_decision(self, project: str, name: str, new: PromotionRecord, evidence: str | None = None) -> None:
        """Record a decision about the promoted checkpoint. Unless it is a refusal, its step becomes the promoted one.
        `evidence` is the hash of the compared values, if any: the same evidence is not another look."""
        verdict = None if new.verdict is None else new.verdict.model_dump_json()
        row = (new.at, new.step, new.previous_step, new.decision, new.key_id, new.note, verdict, evidence)

        def insert(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO promotions (project, name, at, step, previous_step, decision, key_id, note, verdict, "
                "evidence) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (project, name, *row),
            )
            if new.decision != "refused":
                db.execute("INSERT OR REPLACE INTO promoted VALUES (?, ?, ?, ?)", (project, name, new.step, new.at))

        await self._database.run(insert)

    async def decisions(self, project: str, name: str) -> list[PromotionRecord]:
        """Return the decisions about the promoted checkpoint of a model, oldest first."""
        columns = "number, at, step, previous_step, decision, key_id, note, verdict"
        sql = f"SELECT {columns} FROM promotions WHERE project = ? AND name = ? ORDER BY number"
        found = []
        for *values, verdict in await self._read(sql, project, name):
            record = PromotionRecord(**dict(zip(columns.split(", "), values, strict=False)))
            record.verdict = None if verdict is None else Verdict.model_validate_json(verdict)
            found.append(record)
        return found

    async def refused_evidence(self, project: str, name: str) -> set[str]:
        """Return the hashes of the evidence that was refused since a checkpoint was last promoted."""
        of_model = "project = ?1 AND name = ?2"
        rows = await self._read(
            f"SELECT evidence FROM promotions WHERE {of_model} AND decision = 'refused' AND number > "
            f"coalesce((SELECT max(number) FROM promotions WHERE {of_model} AND decision != 'refused'), 0)",
            project,
            name,
        )
        return {evidence for (evidence,) in rows if evidence is not None}

    async def _read(self, sql: str, *parameters: str) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._database.read, sql, parameters)


def set_step(db: sqlite3.Connection, project: str, name: str, step: int) -> None:
    """Set the step of a model's newest published checkpoint, within the transaction of `db`."""
    db.execute("UPDATE models SET step = ? WHERE project = ? AND name = ?", (step, project, name))


def set_identity(db: sqlite3.Connection, project: str, name: str, step: int, identity: str) -> None:
    """Record the identity of a published checkpoint, within the transaction of `db`."""
    db.execute("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?)", (project, name, step, identity))


def _read_settings(text: str) -> ModelSettings:
    """Read stored settings, of older servers too. They had rsLoRA, whose scale is an `alpha` sqrt(rank) times as
    large."""
    data = json.loads(text)
    if (lora := data.get("lora")) and lora.get("use_rslora"):
        lora["alpha"] *= math.sqrt(lora["rank"])
    return ModelSettings.model_validate(data, context=STORED)
