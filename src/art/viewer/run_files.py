"""What the answers about one run are made from, read once and followed as it grows: history, costs and jobs."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from art.costs.ledger import Amount, StepAmounts
from art.errors import StorageError
from art.metrics.findings import RULES
from art.protocol.job_states import ENDED
from art.storage.layout import ModelPaths
from art.storage.state import read_state
from art.viewer.conversation import Row, mapping, number, text_or_none, whole
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import mark, read_row
from art.viewer.index.indexing import Indexer
from art.viewer.live_state import TRAINING_KINDS
from art.viewer.run_answers import CostsAnswer, CostsByStep, Finding, Job, SourceCosts

MOST_NAMES = 2000
"""Metrics that are kept. Programs that make up names by the row have no use for curves."""
_LONGEST_NAME = 300


class Points(NamedTuple):
    """A metric by step, in the order of steps."""

    steps: NDArray[np.int64]  # [P]
    means: NDArray[np.float64]  # [P] over the rows of each step
    counts: NDArray[np.int64]  # [P] number of rows

    def between(self, first: int | None, last: int | None) -> Points:
        """Return the points from step `first` to step `last`, both included; `None` is no bound."""
        inside = np.ones(len(self.steps), dtype=bool)
        if first is not None:
            inside &= self.steps >= first
        if last is not None:
            inside &= self.steps <= last
        return Points(self.steps[inside], self.means[inside], self.counts[inside])


class _Column:
    """Values of one metric, in the order of the rows."""

    __slots__ = ("_is_ascending", "steps", "values")

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")
        self._is_ascending = True
        """Whether each value is of a later step than the one before."""

    def add(self, step: int, value: float) -> None:
        self._is_ascending = self._is_ascending and (not self.steps or step > self.steps[-1])
        self.steps.append(step)
        self.values.append(value)

    def num_steps(self) -> int:
        return len(self.steps) if self._is_ascending else len(set(self.steps))

    def points(self) -> Points:
        steps, values = np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64)
        if self._is_ascending:
            return Points(steps, values, np.ones(len(steps), dtype=np.int64))
        unique, place = np.unique(steps, return_inverse=True)
        counts = np.bincount(place, minlength=len(unique)).astype(np.int64)
        sums = np.bincount(place, weights=values, minlength=len(unique))
        return Points(unique, sums / counts, counts)


class Columns:
    """Collects rows of metrics, and gives each metric by step. Values that are no finite numbers are left out."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._steps: array[int] = array("q")

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row of a step."""
        self._steps.append(step)
        for name, item in row.items():
            value = number(item)
            if value is None or isinstance(item, bool):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_NAMES or len(name) > _LONGEST_NAME:
                    continue
                column = self._columns[name] = _Column()
            column.add(step, value)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have a row, in order."""
        return np.unique(np.array(self._steps, dtype=np.int64))

    def points(self, name: str) -> Points:
        """Return a metric by step; empty for one without values."""
        return self._columns.get(name, _EMPTY).points()

    def num_steps(self, name: str) -> int:
        """Return the number of steps that have a value of a metric."""
        return self._columns.get(name, _EMPTY).num_steps()

    def at(self, step: int) -> dict[str, float]:
        """Return the mean of each metric at a step."""
        means = {}
        for name, column in self._columns.items():
            chosen = np.array(column.values)[np.array(column.steps, dtype=np.int64) == step]
            if len(chosen):
                means[name] = float(chosen.mean())
        return means


_EMPTY = _Column()


def join(first: Points, second: Points, covered: NDArray[np.int64]) -> Points:
    """Join two series of a metric: the second one counts only at steps that are not in `covered`."""
    extra = ~np.isin(second.steps, covered)
    steps = np.concatenate([first.steps, second.steps[extra]])
    order = np.argsort(steps, kind="stable")
    return Points(
        steps[order],
        np.concatenate([first.means, second.means[extra]])[order],
        np.concatenate([first.counts, second.counts[extra]])[order],
    )


class FollowedFile(ABC):
    """A file of JSON lines that programs append to. `refresh` takes the rows that are new.

    A damaged line is skipped and counted. An incomplete last line waits until its writer has finished it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0, 0)
        self._mark = b""
        self._begin()

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows: the file was replaced or deleted."""

    @abstractmethod
    def take(self, row: Row) -> None:
        """Take a row.

        Raises:
            ValueError: it has not the form of a row of this file; it then counts as damaged.
        """

    def refresh(self) -> None:
        """Take new rows. A file that was replaced is read from its beginning; a missing one and a link have no rows.

        A link may lead to a private file, which an export would publish.
        """
        try:
            stat = self._path.lstat()
        except OSError:
            self._begin()
            return
        if not S_ISREG(stat.st_mode):
            self._begin()
            return
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen == self._seen:
            return
        if stat.st_size < self._offset or mark(self._path, self._offset) != self._mark:
            self._begin()
        self._read()
        self._mark = mark(self._path, self._offset)
        self._seen = seen

    def _begin(self) -> None:
        self.num_damaged = 0
        self._offset = 0
        self._mark = mark(self._path, 0)
        self._seen = (0, 0, 0)
        self.reset()

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                row = read_row(line)
                if row is None and not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if row is not None:
                    try:
                        self.take(row)
                    except ValueError:
                        self.num_damaged += 1
                elif line.strip():
                    self.num_damaged += 1


_NOT_METRICS = ("step", "training_step", "recorded_at")


class HistoryFile(FollowedFile):
    """The logged rows of one run."""

    columns: Columns
    times: tuple[array[int], array[float]]
    """Step and Unix time of each row that has both."""

    def reset(self) -> None:
        self.columns = Columns()
        self.times = (array("q"), array("d"))

    def take(self, row: Row) -> None:
        step = whole(row.get("step", row.get("training_step")))
        if step is None:
            raise ValueError("a row of a history has a step")
        self.columns.add(step, {name: value for name, value in row.items() if name not in _NOT_METRICS})
        try:
            recorded_at = datetime.fromisoformat(row["recorded_at"]).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self.times[0].append(step)
        self.times[1].append(recorded_at)


class CostsFile(FollowedFile):
    """The booked costs of one run."""

    amounts: StepAmounts

    def reset(self) -> None:
        self.amounts = StepAmounts()

    def take(self, row: Row) -> None:
        self.amounts.fold(row)

    def total_usd(self) -> float | None:
        """Return all costs in USD; `None` if nothing with a price was booked."""
        amounts = self.amounts.totals().values()
        return math.fsum(amount.usd for amount in amounts) if any(amount.priced for amount in amounts) else None


def describe_costs(file: CostsFile) -> CostsAnswer:
    """Sum costs by source and by step."""
    totals, by_step = file.amounts.totals(), file.amounts.by_step()
    sources = sorted(totals, key=lambda source: (-totals[source].usd, source))
    steps = sorted(step for step, amounts in by_step.items() if any(amount.usd for amount in amounts.values()))
    paid = {source for step in steps for source, amount in by_step[step].items() if amount.usd}
    return CostsAnswer(
        total_usd=file.total_usd(),
        by_source=[_source(source, totals[source]) for source in sources],
        by_step=CostsByStep(
            steps=steps,
            by_source={
                source: [by_step[step].get(source, Amount()).usd for step in steps]
                for source in sources
                if source in paid
            },
        ),
        num_unreadable_lines=file.num_damaged,
    )


def _source(source: str, amount: Amount) -> SourceCosts:
    return SourceCosts(
        source=source,
        usd=amount.usd if amount.priced else None,
        num_unpriced=int(amount.unpriced),
        prompt_tokens=int(amount.prompt_tokens),
        completion_tokens=int(amount.completion_tokens),
        seconds=amount.seconds,
    )


MOST_FINDINGS = 1000
_MOST_JOBS = 20
_FINDING = "findings/"


class JobTable:
    """The jobs of one run. `refresh` reads those that are new or had not ended."""

    def __init__(self, database: ReadOnlyDatabase, project: str, name: str) -> None:
        self._database = database
        self._run = (project, name)
        self.columns = Columns()
        """Metrics of steps that training jobs made."""
        self.times: tuple[array[int], array[float]] = (array("q"), array("d"))
        """Step and end, in Unix time, of each training job."""
        self.origins: list[str] = []
        """Where checkpoints were forked or pulled from."""
        self.findings: list[Finding] = []
        """Findings in the order of steps; the newest `MOST_FINDINGS`."""
        self._settled = 0
        """All jobs with a row id up to this have ended, and were read."""
        self._seen: set[int] = set()
        """Row ids above `_settled` of jobs that have ended, and were read."""
        self._newest: dict[int, Job] = {}

    def refresh(self) -> None:
        """Read new jobs, and those that had not ended."""
        rows = self._database.read(
            "SELECT rowid, kind, state, status FROM jobs WHERE project = ? AND name = ? AND rowid > ? ORDER BY rowid",
            (*self._run, self._settled),
        )
        all_ended = True
        for row_id, kind, state, text in rows:
            status = _decode(text)
            if (job := _job(status, kind, state)) is not None:
                self._newest[row_id] = job
            has_ended = state in ENDED
            if has_ended and row_id not in self._seen:
                self._seen.add(row_id)
                self._note(kind, state, status)
            all_ended = all_ended and has_ended
            if all_ended:
                self._settled = row_id
        self._seen = {row_id for row_id in self._seen if row_id > self._settled}
        for row_id in sorted(self._newest)[:-_MOST_JOBS]:
            if row_id <= self._settled:
                del self._newest[row_id]

    @property
    def newest(self) -> list[Job]:
        """The newest jobs, newest first."""
        return [self._newest[row_id] for row_id in sorted(self._newest, reverse=True)[:_MOST_JOBS]]

    def training_job(self) -> Job | None:
        """Return the newest job that trains."""
        return next((job for job in self.newest if job.kind in TRAINING_KINDS), None)

    def _note(self, kind: str, state: str, status: Row) -> None:
        """Take what a job that has ended measured and said."""
        if state != "succeeded":
            return
        if (origin := text_or_none(mapping(status.get("result")).get("origin"))) is not None:
            self.origins.append(origin)
        step = whole(status.get("step"))
        if kind not in TRAINING_KINDS or step is None:
            return
        metrics = mapping(status.get("metrics"))
        if status.get("trained") is not False:
            self.columns.add(step, metrics)
            if (ended_at := number(status.get("ended_at"))) is not None:
                self.times[0].append(step)
                self.times[1].append(ended_at)
        self.findings += name_findings(step, status.get("findings"), metrics)
        del self.findings[:-MOST_FINDINGS]


def name_findings(step: int, texts: Any, metrics: Row) -> list[Finding]:
    """Make the findings of a step from its sentences. Rules of the catalogue are recognised by what they mean."""
    broken = [name.removeprefix(_FINDING) for name in metrics if name.startswith(_FINDING)]
    findings = []
    for text in texts if isinstance(texts, list) else []:
        if isinstance(text, str):
            name = next((name for name in broken if name in RULES and RULES[name].meaning in text), None)
            findings.append(Finding(step=step, name=name, text=text))
    return findings


def _decode(text: Any) -> Row:
    try:
        return mapping(orjson.loads(text))
    except (TypeError, ValueError):
        return {}


def _job(status: Row, kind: str, state: str) -> Job | None:
    fields = {name: number(status.get(name)) for name in ("created_at", "started_at", "ended_at")}
    error = text_or_none(mapping(status.get("error")).get("message"))
    try:
        return Job.model_validate(
            {"id": str(status.get("job_id")), "kind": kind, "state": state, "error": error,
             "step": whole(status.get("step")), **fields}
        )  # fmt: skip
    except ValueError:  # a kind or state of a newer version
        return None


MOST_KEPT = 8
"""Runs whose numbers stay in memory: a few MB each."""


@dataclass(slots=True)
class RunFiles:
    """The files and rows of one run. Hold `lock` while reading `history`, `costs` and `jobs`."""

    project: str
    name: str
    paths: ModelPaths
    database: ReadOnlyDatabase
    indexer: Indexer
    history: HistoryFile
    costs: CostsFile
    jobs: JobTable
    lock: threading.RLock = field(default_factory=threading.RLock)

    def refreshed(self) -> AbstractContextManager[object]:
        """Read what is new. Returns the lock, to hold for as long as they are read."""
        with self.lock:
            self.history.refresh()
            self.costs.refresh()
            self.jobs.refresh()
        return self.lock

    @property
    def num_damaged_rows(self) -> int:
        return self.history.num_damaged

    def recorded_settings(self) -> dict[str, Any]:
        """Return what was recorded of the run's settings, by section."""
        try:
            return read_state(self.paths.settings) or {}
        except StorageError:
            return {}

    def metric_names(self) -> list[str]:
        """Names of all metrics that the run has values of."""
        return list(dict.fromkeys([*self.history.columns.names, *self.jobs.columns.names]))

    def points(self, metric: str) -> Points:
        """Return a metric by step. Steps that no script logged have what the training job measured."""
        logged = self.history.columns
        return join(logged.points(metric), self.jobs.columns.points(metric), logged.steps())

    def nums_of_points(self) -> dict[str, int]:
        """Return the number of steps of each metric, as `points` has them."""
        logged, measured = self.history.columns, self.jobs.columns
        nums = {name: logged.num_steps(name) for name in logged.names}
        only_measured = np.setdiff1d(measured.steps(), logged.steps())
        if len(only_measured) > 0:
            for name in measured.names:
                extra = np.isin(measured.points(name).steps, only_measured)
                nums[name] = nums.get(name, 0) + int(extra.sum())
        return nums

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have metrics, in order."""
        return np.union1d(self.history.columns.steps(), self.jobs.columns.steps())

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the means of what was logged for a step; what its job measured, if nothing was."""
        return self.history.columns.at(step) or self.jobs.columns.at(step)

    def times(self) -> dict[int, float]:
        """Return when each step was logged or its job ended, the first time."""
        times: dict[int, float] = {}
        for steps, moments in (self.history.times, self.jobs.times):
            earlier = set(times)
            for step, moment in zip(steps, moments, strict=True):
                if step not in earlier:
                    times[step] = min(times.get(step, moment), moment)
        return times


class RunCache:
    """Keeps the runs that were asked for last."""

    def __init__(self, make: Callable[[str, str], RunFiles]) -> None:
        self._make = make
        self._runs: OrderedDict[tuple[str, str], RunFiles] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, project: str, name: str) -> RunFiles:
        """Return a run, as it was kept or new."""
        with self._lock:
            run = self._runs.pop((project, name), None) or self._make(project, name)
            self._runs[project, name] = run
            if len(self._runs) > MOST_KEPT:
                self._runs.popitem(last=False)
            return run
