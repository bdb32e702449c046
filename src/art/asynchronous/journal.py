"""`Journal`: what a pipeline writes down before it goes on, so that a kill at any moment loses nothing.

started          a group has a place in the stream of scenarios
rollout_ended    one rollout of it is over; interrupted ones start again, with the same seeds
group_ended      the judge has scored it
step_begun       a training job is about to be submitted, under an id by which it runs only once
step_ended       it is trained, and in the model's log: its groups leave

journal = await Journal.open(folder, {"rollouts_per_group": 8, "seed": 0})
journal.resumed.groups                  # what an earlier run had under way

It is an SQLite file with what still counts. Records that wait while others are written share the next transaction.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from art.asynchronous.source import PlannedGroup, RolloutOutcome
from art.errors import ConfigError, ConflictError, StorageError
from art.storage.database import Database
from art.storage.jsonl import encode
from art.storage.lock import take_lock
from art.storage.trajectories import parse_group
from art.trajectory import PydanticException, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

VERSION = 2
"""Form of the tables. Form 1 was a file of JSON lines."""
MAX_BATCH = 256
"""Most records in a transaction, so that the first of them does not wait long for the last."""

MakeRecord = Callable[[], Mapping[str, Any]]
"""Function that makes a record. The database's thread calls it, so dumping a rollout does not stop the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A training step that was submitted or was about to be."""

    step: int
    """Checkpoint that the step starts from."""
    job_id: str
    """Id of the training job. The server runs it once, however often it is submitted."""
    numbers: tuple[int, ...]
    """Numbers of the groups that the step trains, in the order of its request."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The step's `TrainConfig` as JSON data, so that the same request can be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """A group that was started and is not trained yet."""

    plan: PlannedGroup
    rollouts: dict[int, RolloutOutcome]
    """Rollouts that ended, by index. It is empty once `groups` is known, which has them."""
    groups: list[TrajectoryGroup] | None
    """What `after_each` made of the finished group; `None` while its rollouts or its judge are not finished."""

    def exchange_ids(self) -> set[str]:
        """Return the ids of the exchanges (recorded answers) that its rollouts name."""
        rollouts = chain(self.rollouts.values(), *(self.groups or ()))
        return {one for rollout in rollouts for one in _exchange_ids(rollout)}

    def without(self, lost: Set[str]) -> KeptGroup:
        """Return it without the rollouts that name one of the exchanges in `lost`; with none if it was finished."""
        if self.groups is not None:
            return self if lost.isdisjoint(self.exchange_ids()) else replace(self, groups=None)
        rollouts = {i: one for i, one in self.rollouts.items() if lost.isdisjoint(_exchange_ids(one))}
        return replace(self, rollouts=rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where an earlier run of the pipeline ended."""

    next_number: int = 0
    """Number of the next group to start."""
    next_position: int = 0
    """Position of the next scenario in the stream."""
    groups: list[KeptGroup] = field(default_factory=list)
    """Groups that are not trained yet, in the order of their numbers."""
    pending: PendingStep | None = None
    evaluations: dict[int, dict[int, RolloutOutcome]] = field(default_factory=dict)
    """Evaluations that began and did not end: for each step, the rollouts that ended, by index."""


def _exchange_ids(rollout: RolloutOutcome) -> Iterator[str]:
    if isinstance(rollout, Trajectory):
        for history in (rollout, *rollout.additional_histories):
            for item in history.messages_and_choices:
                if (exchange_id := getattr(item, "exchange_id", None)) is not None:
                    yield exchange_id


# -- rollouts and groups as JSON, and back --


def dump_outcome(outcome: RolloutOutcome) -> dict[str, Any]:
    """Return how a rollout ended as the fields of a record: `trajectory` or `error`."""
    if isinstance(outcome, Trajectory):
        return {"trajectory": _dump_trajectory(outcome, outcome.model_dump(mode="json"))}
    return {"error": outcome.model_dump(mode="json")}


def dump_group(group: TrajectoryGroup) -> dict[str, Any]:
    dumped = group.model_dump(mode="json")
    for trajectory, data in zip(group.trajectories, dumped["trajectories"], strict=True):
        _dump_trajectory(trajectory, data)
    return dumped


def _dump_trajectory(trajectory: Trajectory, data: dict[str, Any]) -> dict[str, Any]:
    """Leave out a reward that was never set: training tells it from a reward of 0."""
    if "reward" not in trajectory.model_fields_set:
        del data["reward"]
    return data


def load_outcome(record: Mapping[str, Any]) -> RolloutOutcome:
    if "error" in record:
        return PydanticException.model_validate(record["error"])
    group = parse_group({"trajectories": [record["trajectory"]]})  # a group knows the class of each trajectory
    return group.trajectories[0] if group.trajectories else group.exceptions[0]


class Journal:
    """The journal of one pipeline, in a folder that one process at a time uses. Use it in one event loop."""

    def __init__(self, database: Database, resumed: Resumed, lock: int) -> None:
        self._database, self._lock = database, lock
        self._waiting: list[tuple[MakeRecord, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._is_closed = False
        self.resumed = resumed
        """What an earlier run left. It is not kept up to date."""

    @classmethod
    async def open(cls, folder: Path, identity: Mapping[str, Any]) -> Self:
        """Open the journal in `folder`, and begin it if there is none.

        Args:
            identity: what the groups under way depend on, as JSON data by names that the user knows.

        Raises:
            ConfigError: groups are under way that were begun with another identity.
            StorageError: the journal is damaged, another process uses it, or it is of another version of ART.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(_open, folder, dict(identity)))
        try:
            return cls(*await asyncio.shield(opening))
        except asyncio.CancelledError:  # the thread goes on, and takes the lock
            await cls(*await opening).close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write what waits, and let another process open the journal."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._flushing is not None:
            await asyncio.wait([self._flushing])
        await asyncio.to_thread(self._database.close)
        os.close(self._lock)

    async def started(self, plan: PlannedGroup, *, replaces: int | None = None) -> None:
        """Record that a group has taken its place in the stream, before its rollouts begin.

        Args:
            replaces: number of a group that is given up, because this one runs its scenario again.
        """
        more = {} if replaces is None else {"replaces": replaces}
        await self.write(lambda: {"event": "started", "plan": asdict(plan), **more})

    async def rollout_ended(self, number: int, index: int, outcome: RolloutOutcome) -> None:
        """Record how rollout `index` of group `number` ended. Do not change the trajectory before this returns."""
        await self.write(lambda: {"event": "rollout_ended", "group": number, "index": index, **dump_outcome(outcome)})

    async def group_ended(self, number: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Record what `after_each` made of a finished group; nothing means that the group is dropped and leaves."""
        await self.write(
            lambda: {"event": "group_ended", "group": number, "groups": [dump_group(group) for group in groups]}
        )

    async def step_begun(self, pending: PendingStep) -> None:
        """Record a training step before it is submitted. A step that was begun before and not ended is replaced."""
        await self.write(lambda: {"event": "step_begun", "pending": asdict(pending)})

    async def step_ended(self, step: int, numbers: Sequence[int]) -> None:
        """Record that groups were trained and are in the model's log; they leave the journal.

        Args:
            step: checkpoint that was made, or the unchanged one if there was nothing to learn.
        """
        await self.write(lambda: {"event": "step_ended", "step": step, "numbers": list(numbers)})

    async def evaluation_begun(self, step: int) -> None:
        """Record that a checkpoint is to be evaluated. Call it before `step_ended`: a kill may come between."""
        await self.write(lambda: {"event": "evaluation_begun", "step": step})

    async def evaluation_rollout_ended(self, step: int, index: int, outcome: RolloutOutcome) -> None:
        """Record how rollout `index` of an evaluation ended."""
        await self.write(
            lambda: {"event": "rollout_ended", "evaluation": step, "index": index, **dump_outcome(outcome)}
        )

    async def evaluation_ended(self, step: int) -> None:
        """Record that an evaluation is in the model's log; its rollouts leave the journal."""
        await self.write(lambda: {"event": "evaluation_ended", "step": step})

    async def write(self, make: MakeRecord) -> None:
        """Write a record down; returns when it is on disk.

        Raises:
            DiskFullError, StorageError: it could not be written. Nothing was changed.
        """
        if self._is_closed:
            raise ConflictError(f"the journal {self._database.path} is closed; open it again")
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((make, done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="pipeline-journal")
        await done

    async def _flush(self) -> None:
        """Write what waits, as one transaction after the other."""

        def write(connection: sqlite3.Connection, makes: list[MakeRecord]) -> list[Exception | None]:
            """Write records. Returns for each what is wrong with it alone, e.g. metadata that JSON does not have."""
            errors: list[Exception | None] = []
            for make in makes:
                try:
                    statements = _statements(make())
                except Exception as error:
                    errors.append(error)
                    continue
                for statement in statements:
                    connection.execute(*statement)
                errors.append(None)
            return errors

        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                errors = await self._database.run(partial(write, makes=[make for make, _ in batch]))
            except Exception as error:
                logger.exception("the journal %s cannot be written", self._database.path)
                errors = [error] * len(batch)
            for (_, done), failure in zip(batch, errors, strict=True):
                if done.cancelled():
                    continue
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)


# -- the tables --

_TABLES = (
    "CREATE TABLE IF NOT EXISTS head (name TEXT PRIMARY KEY, value)",
    "CREATE TABLE IF NOT EXISTS groups (number INTEGER PRIMARY KEY, plan TEXT NOT NULL, scored TEXT)",
    "CREATE TABLE IF NOT EXISTS rollouts (number INTEGER REFERENCES groups ON DELETE CASCADE, place INTEGER, "
    "outcome TEXT NOT NULL, PRIMARY KEY (number, place))",
    "CREATE TABLE IF NOT EXISTS evaluations (step INTEGER PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS evaluation_rollouts (step INTEGER REFERENCES evaluations ON DELETE CASCADE, "
    "place INTEGER, outcome TEXT NOT NULL, PRIMARY KEY (step, place))",
)
"""`head` has what is known once: version, identity, the next number and position, and the step that is
pending. The other tables have the groups and evaluations that have not ended."""
_SET = "INSERT OR REPLACE INTO head VALUES (?, ?)"
_RAISE = "INSERT INTO head VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)"
Statement = tuple[str, tuple[Any, ...]]


def _statements(record: Mapping[str, Any]) -> list[Statement]:
    """Return what a record changes in the tables."""
    statements: list[Statement] = []
    match record["event"]:
        case "started":
            plan, number = record["plan"], record["plan"]["number"]
            statements += [
                ("INSERT OR REPLACE INTO groups VALUES (?, ?, NULL)", (number, encode(plan))),
                (_RAISE, ("next_number", number + 1)),
                (_RAISE, ("next_position", plan["position"] + 1)),
            ]
            if "replaces" in record:
                statements.append(("DELETE FROM groups WHERE number = ?", (record["replaces"],)))
        case "rollout_ended":
            table, owner, column = "rollouts", "groups", "number"
            if "evaluation" in record:
                table, owner, column = "evaluation_rollouts", "evaluations", "step"
            key = record.get("evaluation", record.get("group"))
            outcome = encode({name: record[name] for name in ("trajectory", "error") if name in record})
            # A late one, whose group has left, adds nothing.
            known = f"WHERE EXISTS (SELECT 1 FROM {owner} WHERE {column} = ?)"
            sql = f"INSERT OR REPLACE INTO {table} SELECT ?, ?, ? {known}"
            statements.append((sql, (key, record["index"], outcome, key)))
        case "group_ended" if record["groups"]:
            number, scored = record["group"], encode({"groups": record["groups"]})
            statements.append(("UPDATE groups SET scored = ? WHERE number = ?", (scored, number)))
            statements.append(("DELETE FROM rollouts WHERE number = ?", (number,)))
        case "group_ended":
            statements.append(("DELETE FROM groups WHERE number = ?", (record["group"],)))
        case "step_begun":
            statements.append((_SET, ("pending", encode(record["pending"]))))
        case "step_ended":
            statements.append(("DELETE FROM head WHERE name = 'pending'", ()))
            statements += [("DELETE FROM groups WHERE number = ?", (number,)) for number in record["numbers"]]
        case "evaluation_begun":
            statements.append(("INSERT OR IGNORE INTO evaluations VALUES (?)", (record["step"],)))
        case "evaluation_ended":
            statements.append(("DELETE FROM evaluations WHERE step = ?", (record["step"],)))
    return statements


# -- opening --


def _open(folder: Path, identity: dict[str, Any]) -> tuple[Database, Resumed, int]:
    path, lock = folder / "journal.db", take_lock(folder / "lock")
    if lock is None:
        raise StorageError(
            f"another process runs a pipeline with the journal {path}. Let it end, or give each program a model `name` "
            "of its own"
        )
    database = None
    try:
        database = Database(path)
        resumed = database.run_blocking(lambda connection: _take_up(connection, path, identity))
        return database, resumed, lock
    except BaseException as error:
        if database is not None:
            database.close()
        os.close(lock)
        cause = error.__cause__
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.OperationalError):
            raise StorageError(
                f"{path} is damaged ({cause}), so it is not known which rollouts were under way. Restore it from a "
                f"copy; or delete the folder {path.parent} to begin without them: checkpoints and log stay"
            ) from error
        raise


def _take_up(connection: sqlite3.Connection, path: Path, identity: dict[str, Any]) -> Resumed:
    """Make the tables if they are missing, and read what an earlier run left."""
    for table in _TABLES:
        connection.execute(table)
    head = dict(connection.execute("SELECT name, value FROM head"))
    version = head.get("version", 1 if path.with_name("journal.jsonl").exists() else VERSION)
    if version != VERSION:
        raise StorageError(
            f"{path} was written by another version of ART (form {version}, expected {VERSION}). Finish the "
            f"pipeline with that version, or delete the folder {path.parent} to begin without what was under way"
        )
    resumed = _read_tables(connection, head)
    before = json.loads(head.get("identity", "{}"))
    changed = [
        f"{name} = {identity.get(name)!r}, was {before.get(name)!r}"
        for name in sorted({*before, *identity})
        if before.get(name) != identity.get(name)
    ]
    if before and changed and (resumed.groups or resumed.pending or resumed.evaluations):
        raise ConfigError(
            f"the pipeline continues one that was begun with other settings ({'; '.join(changed)}), and "
            f"{len(resumed.groups)} of its groups are not trained yet. Set them back to finish those groups, or delete "
            f"the folder {path.parent} to begin without them: checkpoints and log stay as they are"
        )
    connection.execute(_SET, ("version", VERSION))
    connection.execute(_SET, ("identity", encode(identity)))
    return resumed


def _read_tables(connection: sqlite3.Connection, head: Mapping[str, Any]) -> Resumed:
    def outcomes(table: str, column: str, key: int) -> dict[int, RolloutOutcome]:
        rows = connection.execute(f"SELECT place, outcome FROM {table} WHERE {column} = ? ORDER BY rowid", (key,))
        return {place: load_outcome(json.loads(outcome)) for place, outcome in rows}

    groups = []
    for number, plan, scored in connection.execute("SELECT number, plan, scored FROM groups ORDER BY number"):
        kept = None if scored is None else [parse_group(group) for group in json.loads(scored)["groups"]]
        rollouts = outcomes("rollouts", "number", number)
        groups.append(KeptGroup(plan=PlannedGroup(**json.loads(plan)), rollouts=rollouts, groups=kept))
    steps = [step for (step,) in connection.execute("SELECT step FROM evaluations ORDER BY step")]
    pending = json.loads(head.get("pending", "null"))
    return Resumed(
        next_number=head.get("next_number", 0),
        next_position=head.get("next_position", 0),
        groups=groups,
        pending=None if pending is None else PendingStep(**{**pending, "numbers": tuple(pending["numbers"])}),
        evaluations={step: outcomes("evaluation_rollouts", "step", step) for step in steps},
    )
