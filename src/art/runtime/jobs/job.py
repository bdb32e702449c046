"""A job: its payload, what each kind of job implements (`JobWork`), gets and returns, and the store of jobs in SQLite.

The payload has everything that is needed to run a job, and to run it again after a crash. A training job names the
recorded exchanges that it learns from. It does not hold their tokens a second time, so the store reports those
exchanges as needed, and the recorder keeps them until the job has ended.

What the store has written survives `kill -9`. Only `_move` changes the state of a job. It checks the change against the
table of `protocol.training` in the same transaction, so no job can make a transition that the table does not have.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from art.config import TrainConfig, TrainSFTConfig
from art.credit.plan import StepPlan
from art.credit.sft import SftPath
from art.errors import ConflictError, JobCancelledError, NotFoundError, OverloadedError, TrainingError
from art.gateway.workers import json_pieces
from art.protocol.calls import Call, Copy, Export, Pull, Push
from art.protocol.training import ENDED, NEXT_STATES, UNFINISHED, JobKind, JobState, JobStatus
from art.record.usage_book import Pending, write_usage
from art.runtime.registry import RegisteredModel, set_identity, set_step
from art.storage.checkpoints import CheckpointState
from art.storage.database import Database, add_columns

_DEPTH = 4
"""Levels from a request to the trajectories in its groups."""


def make_fingerprint(what: str, request: BaseModel) -> str:
    """Hash a request as it came, to tell one that is sent again from another one with the same job id. `what` is the
    kind of job, and the model that it is for."""
    digest = hashlib.sha256(what.encode() + b"\0")
    for piece in json_pieces(request, _DEPTH):
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


class Payload(BaseModel):
    model_config = ConfigDict(extra="ignore")  # a queued job of an earlier version may have fields that have left

    def with_paths(self, change: Callable[[Path], Path]) -> Self:
        """Make a copy in which `change` was applied to every path of the data directory."""
        changed = {name: new for name, old in self if (new := _with_paths(old, change)) is not old}
        return self.model_copy(update=changed)

    def needed_checkpoints(self) -> Sequence[str]:
        """Paths of checkpoints that must not be deleted before the job has ended."""
        return ()

    def needed_exchanges(self) -> Sequence[str]:
        """Ids of exchanges that must not be deleted before the job has ended."""
        return ()


class TrainPayload(Payload):
    """A reinforcement-learning step. Its samples are built from the recorded exchanges when it runs."""

    config: TrainConfig
    plan: StepPlan
    sft: list[SftPath] = []
    """Supervised data of the step. Its texts were never recorded, so the job holds their tokens."""
    references: dict[int, Path] = {}
    """Paths of checkpoints that the loss compares with, by step."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not (self.plan.samples or self.plan.observations or self.sft)

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(path) for path in self.references.values()]

    def needed_exchanges(self) -> Sequence[str]:
        return self.plan.exchange_ids


class SftPayload(Payload):
    """A supervised step. Its texts were never recorded, so it holds their tokens itself."""

    config: TrainSFTConfig
    paths: list[SftPath]
    plan: StepPlan
    """Metrics and findings of the request. Its own `samples` are empty."""


class FilePayload(Payload):
    """An export of a checkpoint, or its push to the Hugging Face hub or an S3 store."""

    call: Export | Push
    step: int
    result: dict[str, str]
    """Added to the job's `result` when it has succeeded."""

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(self.call.source)]


class AdoptPayload(Payload):
    """A fork or a pull: a checkpoint from elsewhere becomes the newest of the model."""

    call: Copy | Pull
    step: int | None
    """Step of the checkpoint; `None` for the newest in an S3 store, which only the store knows."""
    origin: str
    """Names the place that the checkpoint comes from. Different places have different names."""

    def needed_checkpoints(self) -> Sequence[str]:
        return [str(self.call.source)] if isinstance(self.call, Copy) else []


def _with_paths(value: Any, change: Callable[[Path], Path]) -> Any:
    """Change a path, or the paths among the values of a dictionary or the fields of a call."""
    if isinstance(value, Path):
        return change(value)
    if isinstance(value, dict):
        return {key: _with_paths(item, change) for key, item in value.items()}
    if isinstance(value, Call):
        call: Any = value
        return replace(call, **{item.name: _with_paths(getattr(call, item.name), change) for item in fields(call)})
    return value


PAYLOADS: dict[JobKind, type[Payload]] = {
    "train": TrainPayload,
    "train_sft": SftPayload,
    "fork": AdoptPayload,
    "pull": AdoptPayload,
    "export": FilePayload,
    "push": FilePayload,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A job without its payload, which may be large."""

    job_id: str
    kind: JobKind
    project: str
    name: str
    lane: str
    """Name of the queue in which the job waits. Jobs of one lane run one at a time."""

    @property
    def model_key(self) -> str:
        return f"{self.project}/{self.name}"

    def __str__(self) -> str:
        return f"{self.job_id} ({self.kind} of {self.model_key})"


@dataclass(frozen=True, slots=True)
class Job(Entry):
    payload: Payload
    from_step: int | None = None
    """The model's newest step when the job first began to run."""


class JobControl:
    """How a running job learns that it was cancelled, and reports progress, which by itself nobody reads."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set when the job has to end before it is done."""

    def check(self) -> None:
        """Raise `JobCancelledError` if the job was cancelled."""
        if self.stop.is_set():
            raise JobCancelledError("the job was cancelled")

    async def progress(self, phase: str, done: int, total: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job that succeeded."""

    changes: Mapping[str, Any]
    """New values of fields of the job's status."""
    published_step: int | None = None
    """The model's new step; `None` if the step did not change."""
    identity: str | None = None
    """Identity of the published checkpoint, by which one that is put in its place is noticed."""
    used: Pending = field(default_factory=dict)
    """Usage that is stored in the transaction that records the result."""


class JobWork(Protocol):
    """Runs the jobs of some kinds. A job runs twice if the server dies before it records the result."""

    def lane(self, job: Entry) -> str:
        """Name the lane of a job, the queue in which it waits. Jobs of one lane run one at a time."""
        ...

    def from_step(self, job: Job) -> int | None:
        """Return the model's newest step, which is stored when the job first runs; `None` if the job needs none."""
        ...

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        """Do the job from the step that `from_step()` returned. Raises `JobCancelledError` if it was stopped, with
        nothing left on disk, and `ArtError` if it failed."""
        ...


_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    fingerprint TEXT NOT NULL, payload BLOB, from_step INTEGER, status TEXT NOT NULL, created_at REAL NOT NULL,
    lane TEXT NOT NULL DEFAULT '', started_at REAL,
    needs TEXT NOT NULL DEFAULT '[]',      -- paths of checkpoints that the job needs until it has ended
    exchanges TEXT NOT NULL DEFAULT '[]'   -- ids of exchanges that it needs until then
);
DROP INDEX IF EXISTS jobs_by_state;        -- of older versions
DROP INDEX IF EXISTS jobs_by_model;
CREATE INDEX IF NOT EXISTS jobs_in_state ON jobs (state);
CREATE INDEX IF NOT EXISTS jobs_of_model ON jobs (project, name);
"""
_LATER_COLUMNS = (
    "lane TEXT NOT NULL DEFAULT ''", "started_at REAL", "needs TEXT NOT NULL DEFAULT '[]'",
    "exchanges TEXT NOT NULL DEFAULT '[]'",
)  # fmt: skip
"""Columns of `jobs` that older versions lack."""
_UNFINISHED = ", ".join(f"'{state}'" for state in UNFINISHED)


class JobStore:
    """Stores jobs; every method is one transaction. The store shares the database with the registry, so that a step is
    published and its job is ended in one transaction."""

    def __init__(
        self,
        database: Database,
        *,
        max_per_project: int | None = None,
        on_dropped: Callable[[sqlite3.Connection, str], None] = lambda db, job_id: None,
    ) -> None:
        """A project may have `max_per_project` unfinished jobs (`None` for no limit). `on_dropped` is called with the
        id of a job that failed or was cancelled, in the transaction that records it."""
        self._on_dropped = on_dropped
        self._max_per_project = max_per_project
        self._database = database
        self._data_dir = database.path.parent

    async def start(self) -> None:
        await self._database.run(_create)

    async def known(self, job_id: str, fingerprint: str) -> JobStatus | None:
        """The status of the job that has this id already, or `None`. Raises `ConflictError` if the id belongs to a job
        with another request."""
        return await self._database.run(lambda db: _known(db, job_id, fingerprint))

    async def add(self, job: Job, fingerprint: str) -> JobStatus:
        """Store a queued job, or return the status of the one that has this id already.

        Jobs are compared by the hash of the request. The payload would not do: it depends on the model's step, so a
        request that is sent again would look like another one. Raises `ConflictError` if the id belongs to a job with
        another request, and `OverloadedError` if the project has the largest allowed number of unfinished jobs.
        """
        # Paths are stored relative to the data directory, which may be moved while a job is queued.
        root = self._data_dir
        stored = job.payload.with_paths(lambda path: path.relative_to(root) if path.is_relative_to(root) else path)
        payload = await asyncio.to_thread(lambda: zlib.compress(stored.__pydantic_serializer__.to_json(stored), 1))
        needed = {"needs": stored.needed_checkpoints(), "exchanges": stored.needed_exchanges()}
        status = JobStatus(
            job_id=job.job_id, kind=job.kind, project=job.project, name=job.name, state="queued",
            created_at=time.time(),
        )  # fmt: skip
        values: dict[str, object] = {column: orjson.dumps(list(ids)).decode() for column, ids in needed.items()}
        values |= {"fingerprint": fingerprint, "lane": job.lane, "payload": payload}

        def insert(db: sqlite3.Connection) -> JobStatus:
            if (known := _known(db, job.job_id, fingerprint)) is not None:
                return known
            where = f"state IN ({_UNFINISHED}) AND project = ?"
            ((count,),) = db.execute(f"SELECT count(*) FROM jobs WHERE {where}", (job.project,))
            if self._max_per_project is not None and count >= self._max_per_project:
                raise OverloadedError(
                    f"project {job.project!r} has {count} unfinished jobs, which is the limit "
                    "(`limits.max_jobs_per_project` of the server); try again when one has ended"
                )
            _insert(db, status, values)
            return status

        return await self._database.run(insert)

    async def load(self, job_id: str) -> Job:
        """An unfinished job with its payload. Raises `TrainingError` if another version of ART stored the job, and its
        payload has another form."""
        columns = "kind, project, name, lane, payload, from_step"
        rows = await self._read(f"SELECT {columns} FROM jobs WHERE job_id = ?", (job_id,))
        ((kind, project, name, lane, payload, from_step),) = rows
        try:
            content = await asyncio.to_thread(lambda: PAYLOADS[kind].model_validate_json(zlib.decompress(payload)))
        except ValidationError as error:
            raise TrainingError(
                f"job {job_id} ({kind} of {project}/{name}) was queued by another version of ART, and this version "
                "cannot read it. Submit it again under a new id"
            ) from error
        return Job(job_id, kind, project, name, lane, content.with_paths(self._data_dir.joinpath), from_step)

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

    async def status(self, job_id: str) -> JobStatus:
        """Return the stored status of a job. Raises `NotFoundError` if there is no such job."""
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

    async def needed_checkpoints(self) -> list[str]:
        """Paths of checkpoints that unfinished jobs need."""
        rows = await self._read(f"SELECT needs FROM jobs WHERE state IN ({_UNFINISHED}) AND needs != '[]'")
        return [str(self._data_dir / path) for (needs,) in rows for path in orjson.loads(needs)]

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
        """Change the state of a job, and the fields of its status that `changes` names. Raises `ConflictError` if the
        new state cannot follow the current one and `NotFoundError` if there is no such job."""
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
            set_step(db, model.project, model.name, checkpoint.step)
            set_identity(db, model.project, model.name, checkpoint.step, identity)
            return True

        return await self._database.run(restore)

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
        if state in ("failed", "cancelled"):
            self._on_dropped(db, job_id)
        return status

    async def _read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._database.read, sql, parameters)


def _create(db: sqlite3.Connection) -> None:
    db.executescript(_SCHEMA)
    add_columns(db, "jobs", _LATER_COLUMNS)


def _insert(db: sqlite3.Connection, status: JobStatus, more: Mapping[str, object]) -> None:
    """Insert a job. `more` has the values of columns that its status does not have."""
    values = status.model_dump(include={"job_id", "kind", "project", "name", "state", "created_at"})
    values |= {"status": status.model_dump_json(), **more}
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


def _known(db: sqlite3.Connection, job_id: str, fingerprint: str) -> JobStatus | None:
    row = db.execute("SELECT fingerprint, status FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    if row is None:
        return None
    # Older servers stored a checksum, which is a number, and of a restored job the request is not known.
    if isinstance(row[0], str) and row[0] not in ("", fingerprint):
        raise ConflictError(
            f"job {job_id} exists with other content; use a new job id for a new request", param="job_id"
        )
    return JobStatus.model_validate_json(row[1])


def _unknown(job_id: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id!r}", param="job_id")
