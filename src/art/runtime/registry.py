"""Registered models and training jobs, in SQLite. What is written here survives `kill -9`.

States of a job:   queued --> running --> succeeded
                      \\           |  \\
                       \\          v   +--> failed
                        +------> queued        (the server died: it runs again, with the same result)
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import orjson

from art.config import ModelSettings
from art.errors import ConflictError, NotFoundError
from art.protocol.training import JobStatus
from art.storage.database import Database

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
    project TEXT NOT NULL, name TEXT NOT NULL, base_model TEXT NOT NULL, settings TEXT NOT NULL,
    step INTEGER NOT NULL DEFAULT 0, created_at REAL NOT NULL,
    PRIMARY KEY (project, name)
);
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    fingerprint INTEGER NOT NULL, payload BLOB, from_step INTEGER, status TEXT NOT NULL, created_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, created_at);
"""

JobKind = Literal["train", "train_sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    project: str
    name: str
    base_model: str
    settings: ModelSettings
    step: int
    """Newest published checkpoint."""

    @property
    def key(self) -> str:
        return f"{self.project}/{self.name}"

    def adapter_id(self, step: int) -> str:
        return f"{self.key}@{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    job_id: str
    kind: JobKind
    project: str
    name: str
    payload: dict[str, Any]
    """`call`: the trainer's arguments, resolved samples among them; `metrics` and `ledger` of the plan. All that is
    needed to run the job again."""
    from_step: int | None
    """Checkpoint that the job starts from, fixed when it first runs."""


class Registry:
    """Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start(self) -> None:
        await self._run(lambda db: db.executescript(_SCHEMA))

    async def models(self) -> list[RegisteredModel]:
        rows = await self._run(
            lambda db: db.execute("SELECT project, name, base_model, settings, step FROM models").fetchall()
        )
        return [
            RegisteredModel(
                project=project,
                name=name,
                base_model=base_model,
                settings=ModelSettings.model_validate_json(settings),
                step=step,
            )
            for project, name, base_model, settings, step in rows
        ]

    async def save_model(self, model: RegisteredModel) -> None:
        """Insert, or update all but the step."""
        row = (model.project, model.name, model.base_model, model.settings.model_dump_json(), model.step, time.time())
        await self._run(
            lambda db: db.execute(
                "INSERT INTO models (project, name, base_model, settings, step, created_at) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (project, name) DO UPDATE SET base_model = excluded.base_model, settings = "
                "excluded.settings",
                row,
            )
        )

    async def known_job(self, job_id: str, fingerprint: int) -> JobStatus | None:
        """The status of the job that has this id already, `None` if there is none.

        Raises:
            ConflictError: the id is taken by a job that was asked for in other words.
        """
        row = await self._run(
            lambda db: db.execute("SELECT fingerprint, status FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        )
        return None if row is None else _same_job(job_id, fingerprint, *row)

    async def add_job(self, job: Job, fingerprint: int) -> JobStatus:
        """Store a queued job, or return the status of the one that has this id already.

        Args:
            fingerprint: of the request as it came. What it is resolved to depends on the model's step, and would make
                a request that is sent again look like another one.

        Raises:
            ConflictError: the id is taken by a job that was asked for in other words.
        """
        payload = await asyncio.to_thread(_pack, job.payload)
        status = JobStatus(job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="queued")

        def insert(db: sqlite3.Connection) -> JobStatus:
            known = db.execute("SELECT fingerprint, status FROM jobs WHERE job_id = ?", (job.job_id,)).fetchone()
            if known is not None:
                return _same_job(job.job_id, fingerprint, *known)
            values = (job.job_id, job.kind, job.project, job.name, "queued", fingerprint, payload)
            db.execute(
                "INSERT INTO jobs (job_id, kind, project, name, state, fingerprint, payload, status, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, status.model_dump_json(), time.time()),
            )
            return status

        return await self._run(insert)

    async def unfinished_jobs(self) -> list[Job]:
        """Queued and running jobs, oldest first: what a restarted server goes on with."""
        rows = await self._run(
            lambda db: db.execute(
                "SELECT job_id, kind, project, name, payload, from_step FROM jobs "
                "WHERE state IN ('queued', 'running') ORDER BY created_at, rowid"
            ).fetchall()
        )
        return [
            Job(
                job_id=job_id, kind=kind, project=project, name=name, from_step=from_step,
                payload=orjson.loads(zlib.decompress(payload)),
            )
            for job_id, kind, project, name, payload, from_step in rows
        ]  # fmt: skip

    async def job_status(self, job_id: str) -> JobStatus:
        row = await self._run(lambda db: db.execute("SELECT status FROM jobs WHERE job_id = ?", (job_id,)).fetchone())
        if row is None:
            raise NotFoundError(f"there is no job {job_id!r}", param="job_id")
        return JobStatus.model_validate_json(row[0])

    async def begin_job(self, job: Job, from_step: int) -> JobStatus:
        """queued -> running, remembering where it starts from."""
        status = JobStatus(job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="running")
        await self._update_job(status, from_step=from_step)
        return status

    async def finish_job(self, status: JobStatus) -> None:
        """running -> succeeded, moving the model to the new step in the same transaction."""
        await self._update_job(status, publish_step=status.step)

    async def fail_job(self, status: JobStatus) -> None:
        """queued or running -> failed."""
        await self._update_job(status)

    async def _update_job(
        self, status: JobStatus, *, from_step: int | None = None, publish_step: int | None = None
    ) -> None:
        done = status.state in ("succeeded", "failed")

        def update(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE jobs SET state = ?, status = ?, from_step = coalesce(?, from_step), "
                "payload = CASE WHEN ? THEN NULL ELSE payload END WHERE job_id = ?",
                (status.state, status.model_dump_json(), from_step, done, status.job_id),
            )
            if publish_step is not None:
                db.execute(
                    "UPDATE models SET step = ? WHERE project = ? AND name = ?",
                    (publish_step, status.project, status.name),
                )

        await self._run(update)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.run(work)


def _pack(payload: dict[str, Any]) -> bytes:
    return zlib.compress(orjson.dumps(payload), 1)


def _same_job(job_id: str, fingerprint: int, known_fingerprint: int, status: str) -> JobStatus:
    if known_fingerprint != fingerprint:
        raise ConflictError(f"job {job_id} exists with other content; use a new job id for a new request")
    return JobStatus.model_validate_json(status)
