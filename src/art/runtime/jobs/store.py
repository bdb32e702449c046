"""Jobs, their events, and which exchanges were trained, in SQLite. What is written here survives `kill -9`.

Only `_move` changes the state of a job. It checks the change against the table of `protocol.job_states` in the same
transaction, so no job can make a transition that the table does not have.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from art.errors import ConflictError, NotFoundError, OverloadedError, TrainingError
from art.gateway.record.recorder import exchange_id_at
from art.gateway.record.usage_book import write_usage
from art.protocol.job_states import ENDED, NEXT_STATES, UNFINISHED, JobState
from art.protocol.jobs import JobEvent
from art.protocol.training import JobProgress, JobStatus
from art.runtime.jobs.job import PAYLOADS, Done, Entry, Job
from art.runtime.registry import RegisteredModel, set_identity, set_step
from art.storage.checkpoints import CheckpointState
from art.storage.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    fingerprint TEXT NOT NULL, payload BLOB, from_step INTEGER, status TEXT NOT NULL, created_at REAL NOT NULL,
    lane TEXT NOT NULL DEFAULT '', started_at REAL,
    needs TEXT NOT NULL DEFAULT '[]',      -- paths of checkpoints that the job needs until it has ended
    exchanges TEXT NOT NULL DEFAULT '[]',  -- ids of exchanges that it needs until then
    key_id TEXT NOT NULL DEFAULT ''        -- the API key that asked for it
);
CREATE INDEX IF NOT EXISTS jobs_in_state ON jobs (state);
CREATE INDEX IF NOT EXISTS jobs_of_model ON jobs (project, name);
CREATE TABLE IF NOT EXISTS job_events (
    job_id TEXT NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL,
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trained_exchanges (exchange_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
"""
_UNFINISHED = ", ".join(f"'{state}'" for state in UNFINISHED)


class JobStore:
    """Stores jobs; every method is one transaction. The store shares the database with the registry, so that a step is
    published and its job is ended in one transaction."""

    def __init__(
        self,
        database: Database,
        *,
        max_per_project: int | None = None,
        on_dropped: Callable[[sqlite3.Connection, str], None] | None = None,
    ) -> None:
        """
        Args:
            max_per_project: largest number of unfinished jobs of one project; `None` for no limit.
            on_dropped: called with the id of a job that failed or was cancelled, in the transaction that records it.
        """
        self._on_dropped = on_dropped
        self._max_per_project = max_per_project
        self._database = database
        self._root = database.path.parent
        """The data directory."""

    async def start(self) -> None:
        await self._database.run(lambda db: db.executescript(_SCHEMA))

    async def known(self, job_id: str, fingerprint: str) -> JobStatus | None:
        """The status of the job that has this id already, or `None`.

        Raises:
            ConflictError: the id belongs to a job with another request.
        """
        return await self._database.run(lambda db: _known(db, job_id, fingerprint))

    async def add(self, job: Job, fingerprint: str) -> JobStatus:
        """Store a queued job, or return the status of the one that has this id already.

        Args:
            fingerprint: hash of the request as it came. The payload would not do: it depends on the model's step,
                so a request that is sent again would look like another one.

        Raises:
            ConflictError: the id belongs to a job with another request.
            OverloadedError: the project has the largest allowed number of unfinished jobs.
        """
        stored = job.payload.with_paths(self._shorten)
        payload = await asyncio.to_thread(lambda: zlib.compress(stored.__pydantic_serializer__.to_json(stored), 1))
        needs, exchanges = (
            orjson.dumps(list(ids)).decode() for ids in (stored.needed_checkpoints(), stored.needed_exchanges())
        )
        now = time.time()
        status = JobStatus(
            job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="queued", created_at=now
        )

        def insert(db: sqlite3.Connection) -> JobStatus:
            if (known := _known(db, job.job_id, fingerprint)) is not None:
                return known
            _check_room(db, job.project, self._max_per_project)
            values = {"fingerprint": fingerprint, "lane": job.lane, "key_id": job.key_id}
            _insert(db, status, {**values, "payload": payload, "needs": needs, "exchanges": exchanges})
            _add_event(db, job.job_id, JobEvent(kind="state", at=now, state="queued"))
            return status

        return await self._database.run(insert)

    async def load(self, job_id: str) -> Job:
        """An unfinished job with its payload.

        Raises:
            TrainingError: another version of ART stored the job, and its payload has another form.
        """
        columns = "kind, project, name, lane, payload, from_step, key_id"
        rows = await self._read(f"SELECT {columns} FROM jobs WHERE job_id = ?", (job_id,))
        ((kind, project, name, lane, payload, from_step, key_id),) = rows
        try:
            content = await asyncio.to_thread(lambda: PAYLOADS[kind].model_validate_json(zlib.decompress(payload)))
        except ValidationError as error:
            raise TrainingError(
                f"job {job_id} ({kind} of {project}/{name}) was queued by another version of ART, and this version "
                "cannot read it. Submit it again under a new id"
            ) from error
        return Job(job_id, kind, project, name, lane, content.with_paths(self._extend), from_step, key_id)

    async def recover(self) -> list[Entry]:
        """Queue jobs again that ran when the last server ended, and end jobs that it was about to stop. Returns all
        queued jobs, oldest first."""

        def recover(db: sqlite3.Connection) -> list[Entry]:
            begun = db.execute("SELECT job_id, state FROM jobs WHERE state IN ('running', 'cancelling')").fetchall()
            for job_id, state in begun:
                self._move(db, job_id, "queued" if state == "running" else "cancelled")
            rows = db.execute(
                "SELECT job_id, kind, project, name, lane FROM jobs WHERE state = 'queued' ORDER BY rowid"
            )
            return [Entry(*row) for row in rows]

        return await self._database.run(recover)

    async def last_turns(self) -> dict[tuple[str, str], float]:
        """Return when each project last began a job, as Unix time by (lane, project); 0 for never."""
        rows = await self._read("SELECT lane, project, max(started_at) FROM jobs GROUP BY lane, project")
        return {(lane, project): at or 0.0 for lane, project, at in rows}

    async def status(self, job_id: str) -> JobStatus:
        """Return the stored status of a job.

        Raises:
            NotFoundError: there is no such job.
        """
        rows = await self._read("SELECT status FROM jobs WHERE job_id = ?", (job_id,))
        if not rows:
            raise _unknown(job_id)
        return JobStatus.model_validate_json(rows[0][0])

    async def find(
        self, *, project: str | None = None, name: str | None = None, unfinished: bool = False, limit: int = 100
    ) -> list[JobStatus]:
        """List the statuses of jobs, newest first; by default those of all projects and models."""
        where = [f"state IN ({_UNFINISHED})"] if unfinished else []
        values = [(column, value) for column, value in (("project", project), ("name", name)) if value is not None]
        where += [f"{column} = ?" for column, _ in values]
        rows = await self._read(
            f"SELECT status FROM jobs WHERE {' AND '.join(where or ['1'])} ORDER BY rowid DESC LIMIT ?",
            (*(value for _, value in values), limit),
        )
        return [JobStatus.model_validate_json(row[0]) for row in rows]

    async def step_metrics(self, project: str, name: str, step: int, limit: int) -> list[dict[str, float]]:
        """Metrics of up to `limit` consecutive reinforcement-learning steps up to `step`, oldest first."""
        rows = await self._read(
            "SELECT kind, status FROM jobs WHERE project = ? AND name = ? AND state = 'succeeded' "
            "AND kind IN ('train', 'train_sft', 'fork', 'pull') ORDER BY rowid DESC LIMIT ?",
            (project, name, limit),
        )
        metrics: list[dict[str, float]] = []
        for kind, text in rows:
            status = orjson.loads(text)  # not validated: there may be a thousand of them
            if kind != "train" or status["step"] != step - len(metrics):
                break
            metrics.append(status["metrics"])
        return metrics[::-1]

    async def needed_checkpoints(self) -> list[str]:
        """Paths of checkpoints that unfinished jobs need."""
        rows = await self._read(f"SELECT needs FROM jobs WHERE state IN ({_UNFINISHED}) AND needs != '[]'")
        return [str(self._extend(Path(path))) for (needs,) in rows for path in orjson.loads(needs)]

    @staticmethod
    def needed_exchanges(db: sqlite3.Connection) -> list[str]:
        """Ids of exchanges that unfinished jobs need, as seen by the transaction of `db`."""
        rows = db.execute(f"SELECT exchanges FROM jobs WHERE state IN ({_UNFINISHED}) AND exchanges != '[]'")
        return [exchange_id for (exchanges,) in rows for exchange_id in orjson.loads(exchanges)]

    async def origins(self, project: str, name: str) -> list[str]:
        """The places that this model's forked and pulled checkpoints came from."""
        rows = await self._read(
            "SELECT json_extract(status, '$.result.origin') FROM jobs "
            "WHERE project = ? AND name = ? AND state = 'succeeded' AND kind IN ('fork', 'pull')",
            (project, name),
        )
        return [origin for (origin,) in rows if origin is not None]

    async def move(
        self, job_id: str, state: JobState, *, changes: Mapping[str, Any] | None = None, from_step: int | None = None
    ) -> JobStatus:
        """Change the state of a job, and the fields of its status that `changes` names.

        Raises:
            ConflictError: the new state cannot follow the current one.
            NotFoundError: there is no such job.
        """
        return await self._database.run(lambda db: self._move(db, job_id, state, changes, from_step))

    async def finish(self, job_id: str, done: Done) -> JobStatus:
        """Record that a job succeeded. If it published a step, the model moves to that step in the same transaction."""

        def finish(db: sqlite3.Connection) -> JobStatus:
            status = self._move(db, job_id, "succeeded", done.changes)
            write_usage(db, done.used)
            if (step := done.published_step) is not None:
                set_step(db, status.project, status.name, step)
                if done.identity is not None:
                    set_identity(db, status.project, status.name, step, done.identity)
                learnt = [(exchange_id, step) for exchange_id in done.learnt_from]
                db.executemany("INSERT OR REPLACE INTO trained_exchanges VALUES (?, ?)", learnt)
            return status

        return await self._database.run(finish)

    async def restore(self, model: RegisteredModel, checkpoint: CheckpointState, path: Path, identity: str) -> bool:
        """Record the job that made a checkpoint as succeeded, and the checkpoint as the model's newest.

        Returns:
            False if the job is known, or another one of the model is unfinished: then nothing was lost.
        """
        job_id, now = checkpoint.job_id, time.time()
        status = JobStatus(
            job_id=str(job_id), kind="train", project=model.project, name=model.name, state="succeeded",
            step=checkpoint.step, trained=True, metrics=checkpoint.metrics, checkpoint_path=str(path),
            findings=["the server's record of this step was lost and made again from its checkpoint"],
            created_at=now, started_at=now, ended_at=now,
        )  # fmt: skip

        def restore(db: sqlite3.Connection) -> bool:
            of_model = f"project = ? AND name = ? AND state IN ({_UNFINISHED})"
            sql = f"SELECT 1 FROM jobs WHERE job_id = ? OR {of_model}"
            if db.execute(sql, (job_id, model.project, model.name)).fetchone() is not None:
                return False
            _insert(db, status, {"fingerprint": ""})
            _add_event(db, status.job_id, JobEvent(kind="state", at=now, state="succeeded"))
            set_step(db, model.project, model.name, checkpoint.step)
            set_identity(db, model.project, model.name, checkpoint.step, identity)
            return True

        return await self._database.run(restore)

    async def repeated_step(self, exchange_ids: Sequence[str]) -> int | None:
        """The newest step that learnt from these exchanges, if earlier steps learnt from all of them; else `None`."""
        ((count, step),) = await self._read(
            "SELECT count(*), max(step) FROM trained_exchanges WHERE exchange_id IN (SELECT value FROM json_each(?))",
            (orjson.dumps(list(exchange_ids)).decode(),),
        )
        return step if count == len(exchange_ids) else None

    async def add_progress(self, job_id: str, progress: JobProgress) -> None:
        event = JobEvent(kind="progress", at=time.time(), progress=progress)
        await self._database.run(lambda db: _add_event(db, job_id, event))

    async def events(self, job_id: str, after: int) -> list[JobEvent]:
        """The events with a number above `after`, in order.

        Raises:
            NotFoundError: there is no such job.
        """
        rows = await self._read(
            "SELECT number, event FROM job_events WHERE job_id = ? AND number > ? ORDER BY number", (job_id, after)
        )
        if not rows:
            await self.status(job_id)
        return [JobEvent.model_validate_json(event).model_copy(update={"number": number}) for number, event in rows]

    async def forget_progress(self, before: float) -> int:
        """Delete progress events of ended jobs that were submitted before the Unix time `before`. Events of states stay
        and keep their numbers. Also forget that exchanges from before that time were trained.

        Returns:
            The number of deleted events.
        """
        sql = (
            "DELETE FROM job_events WHERE json_extract(event, '$.kind') = 'progress' AND job_id IN "
            f"(SELECT job_id FROM jobs WHERE created_at < ? AND state NOT IN ({_UNFINISHED}))"
        )

        def forget(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM trained_exchanges WHERE exchange_id < ?", (exchange_id_at(before),))
            return db.execute(sql, (before,)).rowcount

        return await self._database.run(forget)

    def _shorten(self, path: Path) -> Path:
        """A path as it is stored: relative to the data directory, which may be moved while a job is queued."""
        return path.relative_to(self._root) if path.is_relative_to(self._root) else path

    def _extend(self, path: Path) -> Path:
        return self._root / path

    def _move(
        self,
        db: sqlite3.Connection,
        job_id: str,
        state: JobState,
        changes: Mapping[str, Any] | None = None,
        from_step: int | None = None,
    ) -> JobStatus:
        row = db.execute("SELECT state, status FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        if row is None:
            raise _unknown(job_id)
        if state not in NEXT_STATES[row[0]]:
            raise ConflictError(f"job {job_id} is {row[0]} and cannot become {state}", param="job_id")
        now = time.time()
        times = {"started_at": now} if state == "running" else {"ended_at": now} if state in ENDED else {}
        status = JobStatus.model_validate_json(row[1]).model_copy(update={"state": state, **times, **(changes or {})})
        db.execute(
            "UPDATE jobs SET state = ?, status = ?, from_step = coalesce(?, from_step), "
            "started_at = coalesce(?, started_at) WHERE job_id = ?",
            (state, status.model_dump_json(), from_step, times.get("started_at"), job_id),
        )
        if state in ENDED:
            db.execute("UPDATE jobs SET payload = NULL, exchanges = '[]' WHERE job_id = ?", (job_id,))
        _add_event(db, job_id, JobEvent(kind="state", at=now, state=state))
        if state in ("failed", "cancelled") and self._on_dropped is not None:
            self._on_dropped(db, job_id)
        return status

    async def _read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._database.read, sql, parameters)


def _check_room(db: sqlite3.Connection, project: str, most: int | None) -> None:
    if most is None:
        return
    where = f"state IN ({_UNFINISHED}) AND project = ?"
    ((count,),) = db.execute(f"SELECT count(*) FROM jobs WHERE {where}", (project,))
    if count >= most:
        raise OverloadedError(
            f"project {project!r} has {count} unfinished jobs, which is the limit (`limits.max_jobs_per_project` of "
            "the server); try again when one has ended"
        )


def _insert(db: sqlite3.Connection, status: JobStatus, more: Mapping[str, object]) -> None:
    """Insert a job. `more` has the values of columns that its status does not have."""
    values = status.model_dump(include={"job_id", "kind", "project", "name", "state", "created_at"})
    values |= {"status": status.model_dump_json(), **more}
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


def _add_event(db: sqlite3.Connection, job_id: str, event: JobEvent) -> None:
    db.execute(
        "INSERT INTO job_events (job_id, number, event) "
        "SELECT ?, coalesce(max(number), 0) + 1, ? FROM job_events WHERE job_id = ?",
        (job_id, event.model_dump_json(exclude_none=True), job_id),
    )


def _known(db: sqlite3.Connection, job_id: str, fingerprint: str) -> JobStatus | None:
    row = db.execute("SELECT fingerprint, status FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    if row is None:
        return None
    if row[0] not in ("", fingerprint):  # of a restored job the request is not known
        raise ConflictError(
            f"job {job_id} exists with other content; use a new job id for a new request", param="job_id"
        )
    return JobStatus.model_validate_json(row[1])


def _unknown(job_id: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id!r}", param="job_id")
