"""What scripts log for their models: metrics of steps in SQLite, which decide which checkpoint is the best, and for
scripts on other machines the same files as there, by the same writers.

A script sends each row of its history with the groups that it logged, in parts, and sends a part again if it got no
answer. A row has the time at which it was written, so the same row is the same call:

    the row is new          append it, then the groups
    the row is there        append the groups that are missing: an earlier part, a crash in between, or a script that
                            wrote into this very directory
"""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from art.protocol.checkpoint_calls import LogRequest, MetricsRow
from art.runtime.models import Models
from art.storage.database import Database
from art.storage.jsonl import append_lines, has_row
from art.storage.layout import ModelPaths

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


_writing = threading.Lock()
"""Keeps two copies of one request from both finding that the row is new."""


def append_once(
    paths: ModelPaths, split: str, step: int, row: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Append a row to the history and groups to the file of their split and step, unless they are there.

    Raises:
        InvalidRequestError: `split` is not a valid name.
        DiskFullError, StorageError: writing failed. Sending the same again completes it.
    """
    path = paths.trajectories(split, step)
    with _writing:
        if has_row(paths.history, row):
            groups = [group for group in groups if not has_row(path, group)]
        else:
            append_lines(paths.history, [dict(row)])
        if groups:
            append_lines(path, groups)


class RunLogs:
    """Writes what scripts send into the data directory, where the page finds it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def append(self, project: str, name: str, request: LogRequest) -> None:
        """Keep a row and its groups. What was kept before is not kept again.

        Raises:
            NotFoundError: the model is not registered.
            InvalidRequestError: the split is not a valid name.
        """
        model, _ = self._models.find(project, name)
        paths = self._models.paths(model)
        await asyncio.to_thread(append_once, paths, request.split, request.step, request.row, request.groups)
