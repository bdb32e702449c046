"""Stores in SQLite the metrics that scripts log for steps of their models. They decide which checkpoint is the best."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections import defaultdict

from art.protocol.checkpoint_calls import MetricsRow
from art.storage.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS step_metrics (
    project TEXT NOT NULL, name TEXT NOT NULL, row_id TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (project, name, row_id)
) WITHOUT ROWID;
"""


class MetricStore:
    """Stores logged metrics, one row per log call. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    async def add(self, project: str, name: str, row: MetricsRow) -> None:
        """Store a row of logged metrics. A row that was stored before, by its `row_id`, is ignored."""
        finite = {key: value for key, value in row.metrics.items() if math.isfinite(value)}
        values = (project, name, row.row_id, row.step, json.dumps(finite))

        def insert(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR IGNORE INTO step_metrics VALUES (?, ?, ?, ?, ?)", values)

        await self._database.run(insert)

    async def means(self, project: str, name: str) -> dict[int, dict[str, float]]:
        """Return the mean of each metric at each step, over the rows that have the metric."""
        sql = "SELECT step, metrics FROM step_metrics WHERE project = ? AND name = ?"
        rows = await asyncio.to_thread(self._database.read, sql, (project, name))
        values: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step, metrics in rows:
            for key, value in json.loads(metrics).items():
                values[step][key].append(value)
        return {
            step: {key: sum(items) / len(items) for key, items in metrics.items()} for step, metrics in values.items()
        }
