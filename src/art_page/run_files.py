"""What the answers about one run are made from, read once and followed as it grows: history, costs and jobs.

a running server -------------------> Activity -+
files: steps, jobs, number of steps -> RunFacts -+--> describe_run --> RunNow
"""

from __future__ import annotations

import contextlib
import math
import threading
from array import array
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ValidationError

from art.costs import Amount, Ledger
from art.errors import StorageError
from art.metrics.findings import RULES
from art.metrics.scores import Estimate
from art.metrics.verdicts import Ending, HeldOutChange, RunCourse, RunEnd, describe_end
from art.protocol.live import Activity, JobActivity
from art.protocol.training import ENDED
from art.storage.history import read_state
from art.storage.layout import ModelPaths
from art_page.conversation import Row, mapping, number, text_or_none, whole
from art_page.databases import ReadOnlyDatabase
from art_page.index_files import read_row
from art_page.indexing import Indexer
from art_page.run_answers import (
    CostsAnswer,
    CostsByStep,
    RunFinding,
    RunJob,
    RunOutcome,
    RunState,
    SourceCosts,
    StepChange,
)

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


class Columns:
    """Collects rows of metrics, and gives each metric by step. Values that are no finite numbers are left out."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        """Steps and values of each metric, in the order of the rows."""
        self._steps: array[int] = array("q")

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row of a step."""
        self._steps.append(step)
        for name, item in row.items():
            value = None if isinstance(item, bool) else number(item)
            if value is None:
                continue
            if name not in self._columns:
                if len(self._columns) >= MOST_NAMES or len(name) > _LONGEST_NAME:
                    continue
                self._columns[name] = (array("q"), array("d"))
            steps, values = self._columns[name]
            steps.append(step)
            values.append(value)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have a row, in order."""
        return np.unique(np.array(self._steps, dtype=np.int64))

    def points(self, name: str) -> Points:
        """Return a metric by step; empty for one without values."""
        steps, values = (np.array(column) for column in self._columns.get(name, (array("q"), array("d"))))
        unique, place, counts = np.unique(steps.astype(np.int64), return_inverse=True, return_counts=True)
        return Points(unique, np.bincount(place, weights=values, minlength=len(unique)) / counts, counts)

    def at(self, step: int) -> dict[str, float]:
        """Return the mean of each metric at a step."""
        points = {name: self.points(name).between(step, step) for name in self._columns}
        return {name: float(own.means[0]) for name, own in points.items() if len(own.means)}


_NOT_METRICS = ("step", "training_step", "recorded_at")


class HistoryFile:
    """The logged rows of one run. `refresh` takes those that are new.

    A damaged line is skipped. An incomplete last line waits until its writer has finished it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.columns = Columns()
        self.times: list[tuple[int, float]] = []
        """Step and Unix time of each row that has both."""
        self._offset = 0
        self._seen = (0, 0, 0)

    def refresh(self) -> None:
        """Take new rows. A file that was replaced is read from its beginning; a missing one and a link have no rows.

        A link may lead to a private file.
        """
        seen = _look(self._path)
        if seen == self._seen:
            return
        if seen[1] < self._offset or seen[0] != self._seen[0]:
            self._begin()
        self._seen = seen
        if not seen[1]:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                row = read_row(line)
                if row is None and not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                step = None if row is None else whole(row.get("step", row.get("training_step")))
                if row is not None and step is not None:
                    self.columns.add(step, {name: value for name, value in row.items() if name not in _NOT_METRICS})
                    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                        self.times.append((step, datetime.fromisoformat(row["recorded_at"]).timestamp()))


def _look(path: Path) -> tuple[int, int, int]:
    """Return inode, size and time of a file; zeros for a link and for one that is missing."""
    try:
        stat = path.lstat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else (0, 0, 0)


def total_usd(costs: Ledger) -> float | None:
    """Return all costs in USD; `None` if nothing with a price was booked."""
    amounts = costs.totals().values()
    return math.fsum(amount.usd for amount in amounts) if any(amount.priced for amount in amounts) else None


def describe_costs(costs: Ledger) -> CostsAnswer:
    """Sum costs by source and by step."""
    totals, by_step = costs.totals(), costs.by_step()
    sources = sorted(totals, key=lambda source: (-totals[source].usd, source))
    steps = sorted(step for step, amounts in by_step.items() if any(amount.usd for amount in amounts.values()))
    paid = {source for step in steps for source, amount in by_step[step].items() if amount.usd}
    lines = [
        SourceCosts(
            source=source, usd=amount.usd if amount.priced else None, num_unpriced=int(amount.unpriced),
            prompt_tokens=int(amount.prompt_tokens), completion_tokens=int(amount.completion_tokens),
            seconds=amount.seconds,
        )
        for source, amount in ((source, totals[source]) for source in sources)
    ]  # fmt: skip
    usd = {source: [by_step[step].get(source, Amount()).usd for step in steps] for source in sources if source in paid}
    return CostsAnswer(
        total_usd=total_usd(costs), by_source=lines, by_step=CostsByStep(steps=steps, by_source=usd)
    )  # fmt: skip


MOST_FINDINGS = 1000
_MOST_JOBS = 20
_MOMENTS = ("created_at", "started_at", "ended_at")


class JobTable:
    """The jobs of one run. `refresh` reads those that are new or had not ended."""

    def __init__(self, database: ReadOnlyDatabase, project: str, name: str) -> None:
        self._database = database
        self._run = (project, name)
        self.columns = Columns()
        """Metrics of steps that training jobs made."""
        self.times: list[tuple[int, float]] = []
        """Step and end, in Unix time, of each training job."""
        self.origins: list[str] = []
        """Where checkpoints were forked or pulled from."""
        self.findings: list[RunFinding] = []
        """Findings in the order of steps; the newest `MOST_FINDINGS`."""
        self.newest: list[RunJob] = []
        """The newest jobs, newest first."""
        self._settled = 0
        """All jobs with a row id up to this have ended, and were read."""

    def refresh(self) -> None:
        """Read the newest jobs, and what further ones measured that have ended, each after those before it."""
        select = "SELECT rowid, kind, state, status FROM jobs WHERE project = ? AND name = ?"
        self.newest = []
        for _, kind, state, text in self._database.read(f"{select} ORDER BY rowid DESC LIMIT {_MOST_JOBS}", self._run):
            status = _decode(text)
            fields: dict[str, Any] = {name: number(status.get(name)) for name in _MOMENTS}
            fields |= {"id": str(status.get("job_id")), "kind": kind, "state": state, "step": whole(status.get("step"))}
            error = text_or_none(mapping(status.get("error")).get("message"))
            with contextlib.suppress(ValueError):  # a kind or state of a newer version
                self.newest.append(RunJob.model_validate({**fields, "error": error}))
        for row_id, kind, state, text in self._database.read(
            f"{select} AND rowid > ? ORDER BY rowid", (*self._run, self._settled)
        ):
            if state not in ENDED:
                break
            self._settled = row_id
            if state == "succeeded":
                self._note(kind, _decode(text))

    def _note(self, kind: str, status: Row) -> None:
        """Take what a job measured and said."""
        if (origin := text_or_none(mapping(status.get("result")).get("origin"))) is not None:
            self.origins.append(origin)
        step = whole(status.get("step"))
        if kind not in TRAINING_KINDS or step is None:
            return
        metrics = mapping(status.get("metrics"))
        if status.get("trained") is not False:
            self.columns.add(step, metrics)
            if (ended_at := number(status.get("ended_at"))) is not None:
                self.times.append((step, ended_at))
        # Sentences of the catalogue are recognised by what their rules mean.
        broken = [name.removeprefix("findings/") for name in metrics if name.startswith("findings/")]
        texts = status.get("findings")
        for text in texts if isinstance(texts, list) else []:
            if isinstance(text, str):
                name = next((name for name in broken if name in RULES and RULES[name].meaning in text), None)
                self.findings.append(RunFinding(step=step, name=name, text=text))
        del self.findings[:-MOST_FINDINGS]


def _decode(text: Any) -> Row:
    try:
        return mapping(orjson.loads(text))
    except (TypeError, ValueError):
        return {}


class RunFiles:
    """The files and rows of one run. Hold `lock` while reading `history` and `jobs`."""

    def __init__(
        self, project: str, name: str, paths: ModelPaths, database: ReadOnlyDatabase, indexer: Indexer
    ) -> None:
        self.project, self.name, self.paths = project, name, paths
        self.database, self.indexer = database, indexer
        self.history = HistoryFile(paths.history)
        self.jobs = JobTable(database, project, name)
        self.number = 0
        """Number of the run in the index."""
        self.lock = threading.RLock()
        self._costs = (0, Ledger())

    def refreshed(self) -> AbstractContextManager[object]:
        """Read what is new. Returns the lock, to hold for as long as they are read."""
        with self.lock:
            self.history.refresh()
            self.jobs.refresh()
        return self.lock

    def costs(self) -> Ledger:
        """Return what was booked for the run. A link is not followed, since it may lead to a private file."""
        inode = _look(self.paths.costs)[0]
        if inode != self._costs[0]:
            self._costs = (inode, Ledger(path=self.paths.costs if inode else None))
        return self._costs[1]

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
        logged, measured = self.history.columns.points(metric), self.jobs.columns.points(metric)
        extra = ~np.isin(measured.steps, self.history.columns.steps())
        steps = np.concatenate([logged.steps, measured.steps[extra]])
        order = np.argsort(steps, kind="stable")
        means = np.concatenate([logged.means, measured.means[extra]])
        counts = np.concatenate([logged.counts, measured.counts[extra]])
        return Points(steps[order], means[order], counts[order])

    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have metrics, in order."""
        return np.union1d(self.history.columns.steps(), self.jobs.columns.steps())

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the means of what was logged for a step; what its job measured, if nothing was."""
        return self.history.columns.at(step) or self.jobs.columns.at(step)

    def times(self) -> dict[int, float]:
        """Return when each step was logged or its job ended, the first time."""
        logged, ended = (dict(sorted(times, reverse=True)) for times in (self.history.times, self.jobs.times))
        return ended | logged


SERVING_S = 60.0
"""A model counts as serving for this long after its last answer."""
NUM_STEPS = "num_steps"
"""Key of a model's state under which a training loop says at how many steps it will end."""
TRAINING_KINDS = ("train", "train_sft")
_PHASES = {"train": "trains", "publish": "is being loaded into the engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What files and database say about a run."""

    step: int
    seconds_per_step: float | None
    num_steps: int | None
    """Number of steps of the whole run, from `read_num_steps`."""
    training_job: RunJob | None
    """The newest job of a kind in `TRAINING_KINDS`."""
    is_used: bool
    """Whether a server uses the data directory."""
    end: RunEnd | None = None
    """How the training ended, if a recipe made it and nothing was trained since."""


def read_course(paths: ModelPaths) -> tuple[int | None, RunEnd | None]:
    """Return the number of steps at which a run will end, and how it ended, if its training loop has said so.

    ART's recipes say both. A loop of one's own says the first by `model.merge_state({"num_steps": 200})`.
    """
    try:
        state = read_state(paths.state) or {}
    except StorageError:  # the file is the user's own, and may hold anything
        return None, None
    value, end = state.get(NUM_STEPS), None
    with contextlib.suppress(ValidationError):
        end = RunEnd.model_validate(state.get("end"))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None, end


class RunNow(NamedTuple):
    """The fields `state`, `now` and `eta_s` of a `RunSummary`."""

    state: RunState
    now: str | None
    eta_s: float | None


def describe_run(facts: RunFacts, activity: Activity | None) -> RunNow:
    """Describe what happens with a run: its state, one sentence, and the time until it ends.

    Args:
        activity: what the server that runs here does for it; `None` if this program only reads the files.
    """
    job, failure, eta_s = facts.training_job, None, None
    if job is not None and job.state == "failed":
        reason = (job.error or "").strip().partition("\n")[0]
        failure = f"The last training step failed: {reason}" if reason else "The last training step failed."
    elif facts.end is not None and facts.end.ending == "failed":
        failure = next(iter(facts.end.why), "The training failed.")
    state, now = _said_by_files(facts, failure) if activity is None else _said_by_server(facts, activity, failure)
    goes_on = state in ("training", "waiting", "serving")
    if goes_on and facts.num_steps is not None and facts.seconds_per_step is not None:
        eta_s = max(0, facts.num_steps - facts.step) * facts.seconds_per_step
    return RunNow(state, now, eta_s)


def _said_by_files(facts: RunFacts, failure: str | None) -> tuple[RunState, str | None]:
    job, num_steps = facts.training_job, facts.num_steps
    done = f"All {num_steps} steps are done." if num_steps is not None and facts.step >= num_steps else None
    if job is not None and job.state in ("running", "cancelling") and facts.is_used:
        return "training", done
    if facts.end is not None and facts.end.ending == "stopped" and not facts.is_used:
        return "stopped", next(iter(facts.end.why), None)
    if job is not None and job.state in ("queued", "running", "cancelling"):
        waits = f"Step {facts.step + 1} was not finished; it goes on when a server starts on this directory."
        return "waiting", done if facts.is_used else waits
    if failure is not None:
        return "failed", failure
    if facts.is_used or num_steps is None:
        return "idle" if facts.is_used else "finished", done
    return (
        ("finished", done) if done else ("stopped", f"No server runs here; {facts.step} of {num_steps} steps are done.")
    )


def describe_outcome(facts: RunFacts, state: RunState, headline: StepChange | None) -> RunOutcome | None:
    """Say what a training achieved: as the recipe said at its end, else by what the files have.

    Returns:
        `None` while the run goes on, and for one that was not trained.
    """
    is_between = state == "idle" and facts.num_steps is not None and facts.step < facts.num_steps
    if state in ("training", "waiting", "serving") or (is_between and facts.end is None):
        return None
    if facts.end is not None:
        return RunOutcome(kind=facts.end.kind, text=facts.end.what, why=list(facts.end.why))
    change = None
    if headline is not None and headline.a != headline.b and headline.before and headline.after and headline.difference:
        mean, low, high = headline.difference.mean, headline.difference.low, headline.difference.high
        ends = (-math.inf, math.inf) if low is None or high is None else (low, high)
        change = HeldOutChange(
            measure=f"{headline.metric} on held-out rollouts", before=headline.before.mean, after=headline.after.mean,
            difference=Estimate(mean=mean, low=ends[0], high=ends[1], count=headline.difference.num),
        )  # fmt: skip
    if not facts.step and state != "failed":
        return None
    ending: Ending = "failed" if state == "failed" else "stopped" if state == "stopped" else "finished"
    kind, text = describe_end(
        RunCourse(
            step=facts.step, num_steps=facts.num_steps, num_tried=facts.step, num_trained=facts.step, ending=ending,
            change=change,
        )
    )  # fmt: skip
    return RunOutcome(kind=kind, text=text)


def _said_by_server(facts: RunFacts, activity: Activity, failure: str | None) -> tuple[RunState, str | None]:
    jobs = [job for job in activity.jobs if job.kind in TRAINING_KINDS]
    training = next((job for job in jobs if job.runs), jobs[0] if jobs else None)
    trains = training is not None and training.runs
    parts = [] if training is None else [_about_job(training, facts.step + 1)]
    for name, process, is_needed in (
        ("engine", activity.engine, activity.num_requests > 0 or bool(activity.jobs)),
        ("trainer", activity.trainer, training is not None),
    ):
        if is_needed and process != "up":
            parts.append(f"The {name} {'is starting' if process == 'starting' else 'has failed and is tried again'}.")
    if activity.num_requests:
        parts.append(_about_requests(activity, trains=trains))
    elif training is None and failure is not None:
        parts.append(failure)
    elif training is None and activity.answered_s is not None:
        parts.append(f"Nothing runs; the last answer was given {_ago(activity.answered_s)} ago.")
    other = next((job for job in activity.jobs if job.runs and job.kind not in TRAINING_KINDS), None)
    if other is not None:
        parts.append(f"A job ({other.kind}) runs for {_ago(other.age_s)}.")
    state: RunState = "idle" if failure is None else "failed"
    if training is not None:
        state = "training" if trains else "waiting"
    elif activity.num_requests or (activity.answered_s is not None and activity.answered_s < SERVING_S):
        state = "serving"
    return state, " ".join(parts) or None


def _about_job(job: JobActivity, step: int) -> str:
    if not job.runs:
        place = "" if job.queue_place is None else f" in place {job.queue_place}"
        before = "" if job.runs_before is None else f"; {job.runs_before} trains now"
        return f"Step {step} waits{place} for the trainer, for {_ago(job.age_s)}{before}."
    progress = job.progress
    if progress is None:
        return f"Step {step} is being prepared, for {_ago(job.age_s)}."
    done = f": micro-batch {progress.done} of {progress.total}" if progress.phase == "train" and progress.total else ""
    return f"Step {step} {_PHASES.get(progress.phase, progress.phase)}{done}, after {_ago(job.age_s)}."


def _about_requests(activity: Activity, *, trains: bool) -> str:
    count = activity.num_requests
    requests, s = ("1 request", "s") if count == 1 else (f"{count} requests", "")
    if activity.engine_sleeps:
        return f"{requests} wait{s} for the trainer, which uses the engine's device."
    if activity.engine != "up":
        return f"{requests} wait{s} for the engine."
    sampled = f"{requests} {'is' if count == 1 else 'are'} being sampled"
    return sampled + ("." if trains else "; the trainer waits for rollouts.")


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
