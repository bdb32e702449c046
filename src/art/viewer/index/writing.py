"""Writes the index: brings one file of a run, or one step that nobody logged, up to date.

    new lines --read_chunk--> groups --group_entries--> rows, words, sums --one transaction per chunk--> index

The index keeps sums of rollouts' numbers, from which the mean of a step and its 95 % interval follow. Rollouts of one
scenario are alike, so they are not independent. A *cluster* is the rollouts of one scenario in one logged group. With
S_c and n_c the sum and number of values in cluster c, C clusters and the mean m = sum S_c / sum n_c:

    variance of m = C / (C - 1) * sum (S_c - n_c m)^2 / (sum n_c)^2

which is the usual cluster-robust (linearised) variance of a ratio. A single cluster says nothing about other scenarios;
the interval is then that of its rollouts. Sums add up, so they grow with the file.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from art.metrics.groups import metric_name
from art.report.scores import t_quantile
from art.storage.layout import ModelPaths
from art.viewer.conversation import Row
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import (
    TRAIN,
    Fate,
    FileState,
    Place,
    RolloutEntry,
    RolloutValues,
    as_trajectory,
    fate_of,
    find_exchanges,
    group_entries,
    mark,
    planned_rollouts,
    read_chunk,
    read_fates,
    trajectory_entry,
)
from art.viewer.index.store import IndexStore
from art.viewer.rollout_answers import Interval

MOST_METRICS = 64
"""Metrics of a file whose sums are kept. Programs that make up names by the rollout have no use for them."""


class Sums(NamedTuple):
    """Sums over the rollouts of a step that have a value of one metric."""

    clusters: float
    """Number of clusters C."""
    n: float
    """Number of values."""
    s: float
    """Sum of the values."""
    xx: float
    """Sum of their squares."""
    ss: float
    """Sum of S_c^2."""
    sn: float
    """Sum of S_c n_c."""
    nn: float
    """Sum of n_c^2."""

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(*(mine + its for mine, its in zip(self, other, strict=True)))

    def interval(self) -> Interval:
        """Estimate the mean. Its interval is clustered by scenario, or over rollouts where there is one cluster.

        Example: clusters (0, 0) and (1, 1) have the mean 0.5 and, with t = 12.7, the interval -5.85 to 6.85.
        """
        mean = self.s / self.n
        if self.clusters > 1:
            count = self.clusters
            spread = self.ss - 2 * mean * self.sn + mean * mean * self.nn
            variance = count / (count - 1) * max(spread, 0.0) / self.n**2
        elif self.n > 1:
            count = self.n
            variance = max(self.xx - self.n * mean * mean, 0.0) / (count - 1) / count
        else:
            return Interval(mean=mean, num=int(self.n))
        half = t_quantile(int(count) - 1) * math.sqrt(variance)
        return Interval(mean=mean, low=mean - half, high=mean + half, num=int(count))


def sum_group(split: str, rollouts: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, Sums]:
    """Sum the numbers of one logged group by the full name of each metric.

    Args:
        rollouts: number of the scenario and numbers of each rollout.
    """
    by_metric: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for scenario, numbers in rollouts:
        for name, value in numbers.items():
            if not name.startswith("costs/"):
                by_metric[name][scenario].append(value)
    return {
        metric_name(name, split): Sums(
            clusters=len(clusters),
            n=sum(map(len, clusters.values())),
            s=math.fsum(map(sum, clusters.values())),
            xx=math.fsum(value * value for values in clusters.values() for value in values),
            ss=math.fsum(sum(values) ** 2 for values in clusters.values()),
            sn=math.fsum(sum(values) * len(values) for values in clusters.values()),
            nn=math.fsum(len(values) ** 2 for values in clusters.values()),
        )
        for name, clusters in by_metric.items()
        if len(name) <= 200
    }


logger = logging.getLogger(__name__)

_COLUMNS = (
    "run", "file", "split", "step", "grp", "idx", "place", "length", *RolloutValues._fields,
    "advantage", "trained", "dropped",
)  # fmt: skip
_INSERT = f"INSERT INTO rollouts ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_FILE = "id, is_logged, size, inode, changed_ns, mark, plan_ns, num_groups, num_rollouts, num_damaged"
_LONGEST_CHOICE = 100


class _File(NamedTuple):
    """A row of the table `files`, without its place."""

    id: int
    is_logged: int
    size: int
    inode: int
    changed_ns: int
    mark: bytes
    plan_ns: int
    num_groups: int
    num_rollouts: int
    num_damaged: int


class _NewGroup(NamedTuple):
    offset: int
    length: int
    entries: list[RolloutEntry]
    fates: list[Fate | None]


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes the rows of one run."""

    store: IndexStore
    database: ReadOnlyDatabase
    paths: ModelPaths
    run: int
    """Number of the run in the index."""

    def update(self, place: Place, state: FileState) -> FileState:
        """Index what is new in one file. Large files take several calls.

        Returns:
            The state to which the file is indexed: `size` is what was read; `changed_ns` is 0 if there is more.

        Raises:
            OSError: the file cannot be read.
            StorageError: the index cannot be written.
        """
        file = self._file(place)
        if file is not None and self._was_replaced(place, state, file):
            self.store.write(lambda db: _forget(db, self.run, place))
            file = None
        if not state.size:
            return self._update_planned(place, state)
        return self._update_logged(place, state, file)

    def forget(self, place: Place) -> None:
        """Remove a file that no longer exists."""
        self.store.write(lambda db: _forget(db, self.run, place))

    # -- logged --

    def _update_logged(self, place: Place, state: FileState, file: _File | None) -> FileState:
        path = self.paths.trajectories(*place)
        offset = 0 if file is None else file.size
        chunk = read_chunk(path, offset)
        fates = read_fates(self.paths.step(place[1])) if state.plan_ns else {}
        groups = [group for line in chunk.groups if (group := self._new_group(*line, fates)) is not None]
        num_damaged = chunk.num_damaged + len(chunk.groups) - len(groups)
        self._count_tokens(groups)
        new_mark = mark(path, chunk.end)
        reached = state._replace(size=chunk.end, changed_ns=state.changed_ns if chunk.is_last else 0)
        joins = bool(fates) and file is not None and file.plan_ns != state.plan_ns

        def insert(db: sqlite3.Connection) -> FileState:
            current = _read_file(db, self.run, place)
            if (size := 0 if current is None else current.size) != offset:
                return state._replace(size=size, changed_ns=0)  # another process was faster
            file_id = _ensure_file(db, self.run, place, is_logged=True)
            first = 0 if current is None else current.num_groups
            if joins:
                _join(db, file_id, fates)
            self._insert(db, file_id, place, first, groups)
            db.execute(
                "UPDATE files SET size = ?, inode = ?, changed_ns = ?, mark = ?, plan_ns = ?, "
                "num_groups = num_groups + ?, num_rollouts = num_rollouts + ?, num_damaged = num_damaged + ? "
                "WHERE id = ?",
                (
                    reached.size, reached.inode, reached.changed_ns, new_mark, reached.plan_ns, len(groups),
                    sum(len(group.entries) for group in groups), num_damaged, file_id,
                ),
            )  # fmt: skip
            return reached

        return self.store.write(insert)

    def _new_group(self, offset: int, length: int, row: Row, fates: Mapping[str, Fate]) -> _NewGroup | None:
        """Make what is indexed of a line; `None` for one of a form that nobody has thought of."""
        try:
            entries = group_entries(row)
        except Exception:
            logger.exception("skipped the line at byte %d of a file of %s", offset, self.paths.root)
            return None
        known = [next((i for i in entry.exchange_ids if i in fates), None) for entry in entries]
        return _NewGroup(offset, length, entries, [None if i is None else fates[i] for i in known])

    def _count_tokens(self, groups: list[_NewGroup]) -> None:
        """Fill in the number of sampled tokens, where neither the file nor the plan of the step says it."""
        unknown = [
            (group, place)
            for group in groups
            for place, (entry, fate) in enumerate(zip(group.entries, group.fates, strict=True))
            if fate is None and entry.values.num_tokens is None and entry.exchange_ids
        ]
        lengths = _token_counts(
            self.database, (i for group, place in unknown for i in group.entries[place].exchange_ids)
        )
        for group, place in unknown:
            entry = group.entries[place]
            if all(i in lengths for i in entry.exchange_ids):
                values = entry.values._replace(num_tokens=sum(lengths[i] for i in entry.exchange_ids))
                group.entries[place] = entry._replace(values=values)

    def _insert(self, db: sqlite3.Connection, file_id: int, place: Place, first: int, groups: list[_NewGroup]) -> None:
        sums: dict[str, Sums] = {}
        for number, group in enumerate(groups, start=first):
            for index, (entry, fate) in enumerate(zip(group.entries, group.fates, strict=True)):
                where = (self.run, file_id, *place, number, index, group.offset, group.length)
                _insert_rollout(db, where, entry, fate)
            _note_choices(db, self.run, group)
            rollouts = [(entry.values.scenario_key, entry.numbers) for entry in group.entries]
            for name, new in sum_group(place[0], rollouts).items():
                sums[name] = sums[name] + new if name in sums else new
        _add_sums(db, file_id, sums)

    # -- trained, and not logged --

    def _update_planned(self, place: Place, state: FileState) -> FileState:
        rollouts = list(planned_rollouts(self.paths.step(place[1]))) if place[0] == TRAIN else []
        exchanges = find_exchanges(self.database, (i for rollout in rollouts for i in rollout.exchange_ids))
        groups: dict[int, _NewGroup] = {}
        for rollout in rollouts:
            entry = trajectory_entry(as_trajectory(self.database, rollout, exchanges), {})
            group = groups.setdefault(rollout.group, _NewGroup(0, 0, [], []))
            group.entries.append(entry)
            group.fates.append(fate_of(rollout.plan))

        def insert(db: sqlite3.Connection) -> None:
            _forget(db, self.run, place)
            file_id = _ensure_file(db, self.run, place, is_logged=False)
            self._insert(db, file_id, place, 0, list(groups.values()))
            db.execute(
                "UPDATE files SET plan_ns = ?, num_groups = ?, num_rollouts = ? WHERE id = ?",
                (state.plan_ns, len(groups), len(rollouts), file_id),
            )

        self.store.write(insert)
        return state

    # -- files --

    def _file(self, place: Place) -> _File | None:
        rows = self.store.read(
            f"SELECT {_FILE} FROM files WHERE run = ? AND split = ? AND step = ?", (self.run, *place)
        )
        return _File(*rows[0]) if rows else None

    def _was_replaced(self, place: Place, state: FileState, file: _File) -> bool:
        """Whether what was indexed of a file is no longer there."""
        if not file.is_logged or not state.size:
            return bool(state.size) or bool(file.is_logged)
        if state.size < file.size:
            return True
        same = (state.inode, state.changed_ns) == (file.inode, file.changed_ns)
        return not same and mark(self.paths.trajectories(*place), file.size) != file.mark


def _read_file(db: sqlite3.Connection, run: int, place: Place) -> _File | None:
    row = db.execute(f"SELECT {_FILE} FROM files WHERE run = ? AND split = ? AND step = ?", (run, *place)).fetchone()
    return _File(*row) if row else None


def _ensure_file(db: sqlite3.Connection, run: int, place: Place, *, is_logged: bool) -> int:
    db.execute(
        "INSERT OR IGNORE INTO files (run, split, step, is_logged, size, inode, changed_ns, mark, plan_ns, num_groups, "
        "num_rollouts, num_damaged) VALUES (?, ?, ?, ?, 0, 0, 0, x'', 0, 0, 0, 0)",
        (run, *place, is_logged),
    )
    file = _read_file(db, run, place)
    assert file is not None
    return file.id


def _forget(db: sqlite3.Connection, run: int, place: Place) -> None:
    """Delete the rows of a file. Its words stay: they name rollouts that no longer exist, and are never shown."""
    file = _read_file(db, run, place)
    if file is not None:
        for table in ("rollouts", "sums"):
            db.execute(f"DELETE FROM {table} WHERE file = ?", (file.id,))
        db.execute("DELETE FROM files WHERE id = ?", (file.id,))


def _insert_rollout(
    db: sqlite3.Connection, where: tuple[int | str, ...], entry: RolloutEntry, fate: Fate | None
) -> None:
    values = entry.values
    told: tuple[float | int | str | None, ...] = (None, None, None)
    if fate is not None:
        values = values._replace(num_tokens=fate.num_tokens)
        told = (fate.advantage, int(fate.is_trained), fate.dropped_because)
    row_id = db.execute(_INSERT, (*where, *values, *told)).lastrowid
    if entry.text:
        db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row_id, entry.text))


def _join(db: sqlite3.Connection, file_id: int, fates: Mapping[str, Fate]) -> None:
    """Fill in what training did with rollouts that were indexed before its record was there."""
    rows = db.execute("SELECT id, run, first_exchange FROM rollouts WHERE file = ?", (file_id,)).fetchall()
    for row_id, run, exchange in rows:
        if (fate := fates.get(exchange)) is not None:
            db.execute(
                "UPDATE rollouts SET advantage = ?, trained = ?, dropped = ?, num_tokens = ? WHERE id = ?",
                (fate.advantage, int(fate.is_trained), fate.dropped_because, fate.num_tokens, row_id),
            )
            _note_choice(db, run, "dropped", fate.dropped_because)


def _note_choices(db: sqlite3.Connection, run: int, group: _NewGroup) -> None:
    for stop in {entry.values.stop for entry in group.entries}:
        _note_choice(db, run, "stop", stop)
    for reason in {fate.dropped_because for fate in group.fates if fate is not None}:
        _note_choice(db, run, "dropped", reason)


def _note_choice(db: sqlite3.Connection, run: int, kind: str, value: str | None) -> None:
    """Remember a value that the table of rollouts can be filtered by."""
    if value is not None and len(value) <= _LONGEST_CHOICE:
        db.execute("INSERT OR IGNORE INTO choices VALUES (?, ?, ?)", (run, kind, value))


def _add_sums(db: sqlite3.Connection, file_id: int, sums: Mapping[str, Sums]) -> None:
    rows = db.execute("SELECT * FROM sums WHERE file = ?", (file_id,))
    old = {metric: Sums(*values) for _, metric, *values in rows}
    for name, new in sums.items():
        if name in old or len(old) < MOST_METRICS:
            old[name] = old[name] + new if name in old else new
            db.execute("INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (file_id, name, *old[name]))


def _token_counts(database: ReadOnlyDatabase, exchange_ids: Iterable[str]) -> dict[str, int]:
    """Return the number of sampled tokens of each recorded exchange."""
    ids = list(exchange_ids)
    if not ids:
        return {}
    sql = "SELECT id, length(completion) / 4 FROM exchanges WHERE id IN (SELECT value FROM json_each(?))"
    return dict(database.read(sql, (orjson.dumps(ids).decode(),)))
