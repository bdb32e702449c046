"""The durable record of rollouts that other programs run: their project, their group, and how they ended.

    first request under /rollouts/r1/v1, or PUT /api/rollouts/r1      -> running
    PUT with a reward or an outcome                                   -> finished: no more changes
    a training job trains its exchanges                               -> trained_by

Rollout ids are per project: two projects may use the same id independently.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterable
from typing import Any

import orjson

from art.config import SamplingConfig
from art.errors import ConflictError, InvalidRequestError, NotFoundError
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.record.conversations import conversation_hashes, extend_hash
from art.record.recorder import ROLLOUT_COLUMNS, UPSERT_ROLLOUT, Exchange, Recorder, RolloutRow, next_change
from art.storage.layout import validate_name

_NEWEST = "coalesce(json_extract(segments, '$[#-1][0]'), policy_version)"
_COUNTS = f"""(SELECT json_array(count(*), min(policy_version), max({_NEWEST})) FROM exchanges
    WHERE exchanges.rollout_id = rollouts.id AND exchanges.project = rollouts.project)"""
_SELECT = f"SELECT {ROLLOUT_COLUMNS}, {_COUNTS} FROM rollouts"
_TRAINABLE_OF = """trained_by IS NULL AND outcome IS NOT NULL AND project = ? AND (project, id) IN
    (SELECT project, rollout_id FROM exchanges WHERE rollout_id IS NOT NULL AND id IN (SELECT value FROM json_each(?)))
"""
_FINAL = ("model", "group_id", "scenario_id", "reward", "outcome", "error", "metrics", "metadata", "sampling")


class RolloutStore:
    """Reads and updates the rollouts that other programs run. An unknown rollout begins with its first request."""

    def __init__(self, recorder: Recorder) -> None:
        self._database = recorder.database
        self._recorder = recorder

    def find(self, rollout_id: str, project: str | None) -> RolloutStatus | None:
        """Return the status of a rollout, or `None` if it is unknown. Raises `InvalidRequestError` if no project is
        given, and several projects have a rollout with this id."""
        rows = self._rows("id = ? AND project = coalesce(?, project)", [rollout_id, project])
        matches = [_status(row, counts) for row, counts in rows]
        if len(matches) > 1:
            projects = ", ".join(sorted(status.project for status in matches))
            problem = f"rollout {rollout_id!r} is in several projects; set `project` to one of {projects}"
            raise InvalidRequestError(problem, param="project")
        return matches[0] if matches else None

    def announced_model(self, rollout_id: str, project: str | None) -> str | None:
        """Return the model of a rollout; `None` if the rollout is unknown, or in several projects and none is given."""
        statement = "SELECT model FROM rollouts WHERE id = ? AND project = coalesce(?, project)"
        rows = self._database.read(statement, (rollout_id, project))
        return rows[0][0] if len(rows) == 1 else None

    def check_open(self, rollout_id: str, project: str) -> SamplingConfig | None:
        """Check that a rollout can still make requests, and return how it is sampled, if that was set. Raises
        `ConflictError` if the rollout is finished."""
        statement = "SELECT outcome, sampling FROM rollouts WHERE project = ? AND id = ?"
        rows = self._database.read(statement, (project, rollout_id))
        outcome, sampling = rows[0] if rows else (None, None)
        if outcome is not None:
            problem = f"rollout {rollout_id!r} is finished ({outcome}); give each rollout an id of its own"
            raise ConflictError(problem, param="rollout_id")
        return None if sampling is None else SamplingConfig.model_validate_json(sampling)

    async def get(self, rollout_id: str, project: str | None) -> RolloutRecord:
        """Return a rollout with its conversations. Raises `NotFoundError` if the rollout is unknown."""
        status = self.find(rollout_id, project)
        if status is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r} on this server", param="rollout_id")
        histories: list[dict[str, Any]] = []
        if status.num_exchanges:
            exchanges = await asyncio.to_thread(self._recorder.by_rollout, rollout_id, status.project)
            histories = await asyncio.to_thread(rollout_histories, exchanges)
        return RolloutRecord(**status.model_dump(), histories=histories)

    async def put(self, rollout_id: str, update: RolloutUpdate, project: str | None) -> RolloutStatus:
        """Apply an update to a rollout, in one transaction. An unknown rollout is created.

        Raises `ConflictError` if the rollout is finished, and the update would change it, and `InvalidRequestError` if
        the update does not tell the project, or names several.

        Args:
            project: the only project that the caller may change; `None` if the caller may change all.
        """
        validate_name(rollout_id, param="rollout_id")
        owner = self._owner(rollout_id, update, project)

        def work(db: sqlite3.Connection) -> None:
            sql = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE project = ? AND id = ?"
            rows = db.execute(sql, (owner, rollout_id))
            known = next((RolloutRow(*row) for row in rows), None)
            row = _apply(known or RolloutRow(owner, rollout_id, time.time(), 0), update)
            if row != known:
                db.execute(UPSERT_ROLLOUT, row._replace(change=next_change(db)))

        await self._database.run(work)
        status = self.find(rollout_id, owner)
        assert status is not None
        return status

    async def page(self, query: RolloutQuery) -> RolloutPage:
        conditions, values = ["change > ?"], [query.since]
        for column in ("project", "model", "group_id", "outcome"):
            if (value := getattr(query, column)) is not None:
                conditions.append(f"{column} = ?")
                values.append(value)
        for column, is_set in (("outcome", query.finished), ("trained_by", query.trained)):
            if is_set is not None:
                conditions.append(f"{column} IS {'NOT ' if is_set else ''}NULL")
        where = f"{' AND '.join(conditions)} ORDER BY change LIMIT {query.limit}"
        rows = await asyncio.to_thread(self._rows, where, values)
        return RolloutPage(
            rollouts=[_status(row, counts) for row, counts in rows],
            next_since=rows[-1][0].change if rows else query.since,
        )

    async def mark_trained(self, exchange_ids: Iterable[str], job_id: str, project: str) -> None:
        """Set `trained_by` of a project's finished rollouts of these exchanges to a job, unless an earlier job trained
        them."""
        ids = orjson.dumps(list(exchange_ids)).decode()

        def work(db: sqlite3.Connection) -> None:
            _set(db, "untrainable", None, f"untrainable IS NOT NULL AND {_TRAINABLE_OF}", project, ids)
            _set(db, "trained_by", job_id, _TRAINABLE_OF, project, ids)

        await self._database.run(work)

    async def mark_refused(
        self, exchange_ids: Iterable[str], refused: Iterable[str], reason: str, project: str
    ) -> None:
        """Note that a project's training call was refused: list its rollouts again, those of the `refused` exchanges
        with why."""
        every, at_fault = (orjson.dumps(list(ids)).decode() for ids in (exchange_ids, refused))

        def work(db: sqlite3.Connection) -> None:
            _set(db, "untrainable", reason, _TRAINABLE_OF, project, at_fault)
            # They are untrained already: this renews `change`.
            _set(db, "trained_by", None, _TRAINABLE_OF, project, every)

        await self._database.run(work)

    @staticmethod
    def unmark_trained(db: sqlite3.Connection, job_id: str) -> None:
        """Clear `trained_by` of the rollouts of a job that did not train them, so that another job can."""
        _set(db, "trained_by", None, "trained_by = ?", job_id)

    def _owner(self, rollout_id: str, update: RolloutUpdate, project: str | None) -> str:
        announced = update.model.partition("/")[0] if update.model is not None else None
        named = {name for name in (project, update.project, announced) if name is not None}
        if len(named) > 1:
            got = f"{', '.join(sorted(named))} from the key, `project` and `model` (written as project/name)"
            raise InvalidRequestError(f"a rollout belongs to one project; got {got}", param="project")
        if named:
            return validate_name(named.pop(), param="project")
        known = self.find(rollout_id, None)
        if known is None:
            problem = f"rollout {rollout_id!r} is new: name its project with `model` (project/name) or `project`"
            raise InvalidRequestError(problem, param="project")
        return known.project

    def _rows(self, where: str, values: list[Any]) -> list[tuple[RolloutRow, str]]:
        rows = self._database.read(f"{_SELECT} WHERE {where}", values)
        return [(RolloutRow(*row[:-1]), row[-1]) for row in rows]


def _set(db: sqlite3.Connection, column: str, new: str | None, where: str, *values: str) -> None:
    """Set a column of rows. Each row gets a `change` of its own, since a page may end between any two."""
    keys = db.execute(f"SELECT project, id FROM rollouts WHERE {where} ORDER BY change", values).fetchall()
    statement = f"UPDATE rollouts SET {column} = ?, change = ? WHERE project = ? AND id = ?"
    db.executemany(statement, [(new, change, *key) for change, key in enumerate(keys, next_change(db))])


def _apply(row: RolloutRow, update: RolloutUpdate) -> RolloutRow:
    values: dict[str, Any] = {name: value for name in _FINAL if (value := getattr(update, name)) is not None}
    for name in ("metrics", "metadata", "sampling"):
        if name in values:
            value = values[name].model_dump() if name == "sampling" else values[name]
            values[name] = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    changed = row._replace(**values)
    if row.outcome is not None and changed != row:
        what = ", ".join(f"`{name}`" for name in values if getattr(row, name) != values[name])
        raise ConflictError(f"rollout {row.id!r} is finished ({row.outcome}); this call would change its {what}")
    return changed


def _status(row: RolloutRow, counts: str) -> RolloutStatus:
    num_exchanges, first, last = orjson.loads(counts)
    fields = row._asdict()
    del fields["id"], fields["change"]
    fields |= {"metrics": orjson.loads(row.metrics), "metadata": orjson.loads(row.metadata)}
    fields["sampling"] = None if row.sampling is None else orjson.loads(row.sampling)
    return RolloutStatus(
        rollout_id=row.id, **fields, num_exchanges=num_exchanges, first_policy_version=first, last_policy_version=last
    )


def rollout_histories(exchanges: list[Exchange]) -> list[dict[str, Any]]:
    """Rebuild a rollout's conversations: messages, with an OpenAI choice in place of each recorded answer. An exchange
    (a request with its answer) that a later one continues is part of the later one's conversation. A conversation that
    forked gives one history per end."""
    recorded: dict[bytes, Exchange] = {}
    ends: dict[str, bytes] = {}
    hashes: dict[str, list[bytes]] = {}
    for exchange in exchanges:
        model = f"{exchange.project}/{exchange.name}"
        hashes[exchange.id] = conversation_hashes(model, exchange.tools, None, exchange.request_messages)
        ends[exchange.id] = extend_hash(hashes[exchange.id][-1], exchange.message)
        recorded[ends[exchange.id]] = exchange
    continued = {conversation for passed in hashes.values() for conversation in passed}
    histories = []
    for exchange in exchanges:
        if ends[exchange.id] not in continued:
            pairs = zip(exchange.request_messages, hashes[exchange.id][1:], strict=True)
            items = [_choice(recorded[end]) if end in recorded else message for message, end in pairs]
            histories.append({"messages_and_choices": [*items, _choice(exchange)], "tools": exchange.tools})
    return histories


def _choice(exchange: Exchange) -> dict[str, Any]:
    return {
        "index": 0, "message": exchange.message, "finish_reason": exchange.finish_reason, "logprobs": None,
        "exchange_id": exchange.id, "exchange": exchange.summary(),
    }  # fmt: skip
