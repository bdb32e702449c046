"""Keeps the index up to date while somebody looks: at once for the step that is asked for, the rest in the background.

Nothing is indexed unless an answer needs it. The background thread begins with the newest step, and ends when all is
indexed or nobody has asked for a while. A file that has changed is indexed again as a whole, in one transaction.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from art.errors import StorageError
from art.metrics.groups import metric_name
from art.metrics.scores import t_quantile
from art.storage.layout import DataDir, ModelPaths
from art.storage.step_files import RolloutPlan
from art_page.databases import IndexStore
from art_page.index_files import (
    FileState,
    Place,
    RolloutEntry,
    RolloutValues,
    group_entries,
    read_fates,
    read_groups,
    survey,
)
from art_page.rollout_answers import Indexing, Interval

logger = logging.getLogger(__name__)

MOST_METRICS = 64
"""Metrics of a file whose sums are kept. Programs that make up names by the rollout have no use for them."""


SURVEY_S = 0.5
"""A look at the files of a run counts for this long: the parts of a page ask at the same time."""
PATIENCE_S = 30.0
"""The background thread ends when nobody has asked for this long."""
_AT_ONCE_BYTES = 64 << 20
"""A step that is asked for is indexed before the answer, up to this size."""


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


_COLUMNS = (
    "run", "file", "split", "step", "grp", "idx", "place", "length", *RolloutValues._fields,
    "advantage", "trained", "dropped",
)  # fmt: skip
_INSERT = f"INSERT INTO rollouts ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_LONGEST_CHOICE = 100


class _Group(NamedTuple):
    """What is indexed of a group, and what training did with each of its rollouts."""

    offset: int
    length: int
    entries: list[RolloutEntry]
    plans: Sequence[RolloutPlan | None]


@dataclass(slots=True)
class _Run:
    """What is known of one run, and how its files become rows of the index."""

    store: IndexStore
    paths: ModelPaths
    number: int
    """Number of the run in the index."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held for a moment, while what is below changes."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a file is indexed, which may take long."""
    states: dict[Place, FileState] = field(default_factory=dict)
    """Files on the disk."""
    indexed: dict[Place, FileState] = field(default_factory=dict)
    """State of each file when it was indexed."""
    surveyed_at: float = -SURVEY_S
    asked_at: float = 0.0

    def pending(self) -> list[Place]:
        """Files that are not up to date, the newest step first."""
        places = [place for place, state in self.states.items() if self.indexed.get(place) != state]
        return sorted(places, key=lambda place: (place[1], place[0]), reverse=True)

    def progress(self) -> Indexing | None:
        """How far the index has got; `None` when it is complete."""
        if not (pending := self.pending()):
            return None
        total_bytes = sum(state.size for state in self.states.values())
        done_bytes = total_bytes - sum(self.states[place].size for place in pending)
        return Indexing(done_bytes=done_bytes, total_bytes=total_bytes)

    def update(self, place: Place, state: FileState) -> None:
        """Index one file in place of what was indexed of it before.

        Raises:
            OSError: the file cannot be read.
            StorageError: the index cannot be written.
        """

        def index(db: sqlite3.Connection) -> None:
            self._forget(db, place)
            row = (self.number, *place, *state, 0, 0)
            file_id = db.execute("INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
            sums: dict[str, Sums] = {}
            num_groups = num_rollouts = 0
            for group in self._logged(place, state):
                for number, (entry, plan) in enumerate(zip(group.entries, group.plans, strict=True)):
                    values = entry.values
                    told: tuple[float | None, int | None, str | None] = (None, None, None)
                    if plan is not None:
                        values = values._replace(num_tokens=plan.trained_tokens + sum(plan.dropped_tokens.values()))
                        told = (plan.advantage, int(plan.trained_tokens > 0), plan.dropped_because)
                    where = (self.number, file_id, *place, num_groups, number, group.offset, group.length)
                    row_id = db.execute(_INSERT, (*where, *values, *told)).lastrowid
                    if entry.text:
                        db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row_id, entry.text))
                    for kind, value in (("stop", values.stop), ("dropped", told[2]), *entry.named()):
                        if value is not None and len(value) <= _LONGEST_CHOICE:
                            db.execute("INSERT OR IGNORE INTO choices VALUES (?, ?, ?)", (self.number, kind, value))
                numbers = [(entry.values.scenario_key, entry.numbers) for entry in group.entries]
                for name, new in sum_group(place[0], numbers).items():
                    if name in sums or len(sums) < MOST_METRICS:
                        sums[name] = sums[name] + new if name in sums else new
                num_groups += 1
                num_rollouts += len(group.entries)
            rows = [(file_id, metric, *values) for metric, values in sums.items()]
            db.executemany("INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            counts = (num_groups, num_rollouts, file_id)
            db.execute("UPDATE files SET num_groups = ?, num_rollouts = ? WHERE id = ?", counts)

        self.store.write(index)

    def forget(self, place: Place) -> None:
        """Remove a file that no longer exists."""
        self.store.write(lambda db: self._forget(db, place))

    def _forget(self, db: sqlite3.Connection, place: Place) -> None:
        """Delete the rows of a file. Its words stay: they name rollouts that no longer exist, and are never shown."""
        where = "(SELECT id FROM files WHERE run = ? AND split = ? AND step = ?)"
        for table, column in (("rollouts", "file"), ("sums", "file"), ("files", "id")):
            db.execute(f"DELETE FROM {table} WHERE {column} = {where}", (self.number, *place))

    def _logged(self, place: Place, state: FileState) -> Iterator[_Group]:
        """Yield the groups of a file, without those that have a form that nobody has thought of."""
        fates = read_fates(self.paths.step(place[1])) if state.plan_ns else {}
        for offset, length, row in read_groups(self.paths.trajectories(*place)):
            try:
                entries = group_entries(row)
            except Exception:
                logger.exception("skipped the line at byte %d of a file of %s", offset, self.paths.root)
                continue
            plans = [next((fates[i] for i in entry.exchange_ids if i in fates), None) for entry in entries]
            yield _Group(offset, length, entries, plans)


class Indexer:
    """Indexes the runs of a data directory on demand. Any thread may ask."""

    def __init__(self, store: IndexStore, data_dir: DataDir) -> None:
        self.store = store
        self._data_dir = data_dir
        self._runs: dict[tuple[str, str], _Run] = {}
        self._lock = threading.Lock()
        self._progressed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.survey_s = SURVEY_S
        self.num_changes = 0
        """Number of times that the index has changed."""

    def ensure(
        self, project: str, name: str, *, places: Sequence[Place] = (), wait_s: float = 0.0
    ) -> tuple[int, Indexing | None]:
        """Bring the index of a run up to date as far as there is time for it.

        Args:
            places: splits and steps that are indexed before this returns, unless they are very large.
            wait_s: seconds to wait for the background thread to finish all others.

        Returns:
            The number of the run in the index, and how far it has got; `None` when it is complete.
        """
        run = self._run(project, name)
        with run.lock:
            if time.monotonic() - run.surveyed_at >= self.survey_s:
                run.states = survey(run.paths)
                run.surveyed_at = time.monotonic()
                for place in run.indexed.keys() - run.states.keys():
                    run.forget(place)
                    del run.indexed[place]
                    self.num_changes += 1
        for place in places:
            state = run.states.get(place)
            if state is not None and state.size <= _AT_ONCE_BYTES and run.indexed.get(place) != state:
                self._update(run, place, state)
        with run.lock:
            progress = run.progress()
        if progress is None:
            return run.number, None
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)
                self._thread.start()
        deadline = time.monotonic() + wait_s
        with self._progressed:
            while progress is not None and (left_s := deadline - time.monotonic()) > 0 and self._thread is not None:
                self._progressed.wait(left_s)
                with run.lock:
                    progress = run.progress()
        return run.number, progress

    def files(self, project: str, name: str) -> dict[Place, FileState]:
        """Return the files of a run on the disk, as `ensure` saw them last."""
        return dict(self._run(project, name).states)

    def close(self) -> None:
        """End the background thread, after the file that it is at."""
        self._is_closed = True
        thread = self._thread
        if thread is not None:
            thread.join()

    # -- one run --

    def _run(self, project: str, name: str) -> _Run:
        with self._lock:
            run = self._runs.get((project, name))
            if run is None:
                run = self._runs[project, name] = self._load(project, name)
            run.asked_at = time.monotonic()
            return run

    def _load(self, project: str, name: str) -> _Run:
        find = "SELECT id FROM runs WHERE project = ? AND name = ?"
        rows = self.store.read(find, (project, name))
        if not rows:
            self.store.write(
                lambda db: db.execute("INSERT OR IGNORE INTO runs (project, name) VALUES (?, ?)", (project, name))
            )
            rows = self.store.read(find, (project, name))
        paths: ModelPaths = self._data_dir.model(project, name)
        sql = "SELECT split, step, size, changed_ns, plan_ns FROM files WHERE run = ?"
        files = self.store.read(sql, (rows[0][0],))
        indexed = {(split, step): FileState(*state) for split, step, *state in files}
        return _Run(self.store, paths, rows[0][0], indexed=indexed)

    def _update(self, run: _Run, place: Place, state: FileState) -> None:
        """Index a file. One that cannot be read is tried again when it has changed."""
        with run.writing:
            if run.indexed.get(place) == state:  # another thread has done it
                return
            try:
                run.update(place, state)
            except OSError as error:
                logger.warning("%s cannot be indexed: %s", run.paths.trajectories(*place), error)
            with run.lock:
                run.indexed[place] = state
                self.num_changes += 1

    # -- background --

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._update(*task)
                with self._progressed:
                    self._progressed.notify_all()
        except StorageError as error:  # asked again, it is tried again
            logger.warning("indexing stopped: %s", error)
        finally:
            with self._lock:
                self._thread = None
            with self._progressed:
                self._progressed.notify_all()

    def _next(self) -> tuple[_Run, Place, FileState] | None:
        """The newest pending file of the run that was asked for last."""
        if self._is_closed:
            return None
        with self._lock:
            runs = sorted(self._runs.values(), key=lambda run: run.asked_at, reverse=True)
        for run in runs:
            with run.lock:
                if time.monotonic() - run.asked_at < PATIENCE_S and (places := run.pending()):
                    return run, places[0], run.states[places[0]]
        return None
