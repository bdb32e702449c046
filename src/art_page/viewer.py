"""`Viewer`: every answer of the page. The server's routes and `art view` call nothing else.

    viewer = Viewer(DataDir(Path(".art")))
    viewer.runs().runs[0].step
    viewer.rollouts("games", "agent-001", RolloutQuery(step=12, sort="reward")).rows

Methods block on files; call them in a thread. Any number of threads may share a viewer. It writes what `label` is told,
and its index of rollouts, which can be deleted at any time; all else only reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from art.config import ModelSettings
from art.errors import InvalidRequestError, NotFoundError
from art.metrics.catalogue import meaning_of
from art.protocol.live import Activity
from art.storage.checkpoints import list_steps
from art.storage.labels import LabelChanges, RunLabels, read_labels, set_labels
from art.storage.layout import DataDir, validate_name
from art.storage.lock import lock_holder
from art_page import run_answers
from art_page.checkpoints import compare_steps, list_checkpoints, measure_change
from art_page.curves import (
    CurvePoint,
    as_series,
    banded_metrics,
    curve,
    describe_step,
    read_series,
    sum_ledgers,
    thin,
)
from art_page.databases import IndexStore, ReadOnlyDatabase
from art_page.index_files import TRAIN, FileState, Place
from art_page.indexing import Indexer
from art_page.rollout_answers import (
    GroupAnswer,
    Indexing,
    RepeatedRequest,
    RequestQuery,
    RolloutDetail,
    RolloutKey,
    RolloutTable,
    RolloutTableQuery,
    RolloutTokens,
    TokensQuery,
    TreeAnswer,
    TreeQuery,
)
from art_page.rollouts import list_rollouts, places_of, read_group, read_rollout
from art_page.run_files import (
    TRAINING_KINDS,
    RunFacts,
    RunFiles,
    describe_costs,
    describe_outcome,
    describe_run,
    read_course,
    total_usd,
)
from art_page.seeds import find_groups, seed_of
from art_page.tokens import TokenReader, repeated_request, tree_places
from art_recipes.comparing.model_comparison import JSON_FILE, read_comparison, remarks

T = TypeVar("T")

INDEX_WAIT_S = 0.2
"""An answer that needs the whole index waits this long for it, and then says how far it has got."""
COMPLETE_WAIT_S = 60.0
"""`complete` gives a run up whose index has not got on for this long."""
MOST_KEPT = 8
"""Runs whose numbers stay in memory: a few MB each."""
MAIN_METRICS = ("val/reward", "train/reward", "test/reward", "data/reward_mean", "loss/sft", "loss/train")
"""The main metric is the first of these that has two values, or else any value."""
_SPARK_POINTS = 60
_PACE_STEPS = 20
_FINDINGS = 5
MODELS_FOLDER = "models"
TRAINING_REWARD, STEP_SECONDS = "train/reward", "time/step_wall_s"


def list_names(data_dir: DataDir, database: ReadOnlyDatabase, project: str | None = None) -> list[tuple[str, str]]:
    """List project and name of every run that the database or a folder knows."""
    names = set(database.read("SELECT project, name FROM models"))
    for folder in _folders(data_dir.root):
        names |= {(folder.name, model.name) for model in _folders(folder / MODELS_FOLDER)}
    return sorted((p, n) for p, n in names if project in (None, p))


def _newest(metric: str | None, points: Sequence[CurvePoint]) -> run_answers.CurrentReward | None:
    """Return the last point of a metric's curve; `None` for an empty curve."""
    if metric is None or not points:
        return None
    last = points[-1]
    return run_answers.CurrentReward(
        split=metric.partition("/")[0], step=last.step, mean=last.mean, low=last.low, high=last.high, num=last.num or 1
    )


def summarize(run: RunFiles) -> tuple[run_answers.RunSummary, run_answers.RunJob | None]:
    """Describe a run in one line, as far as its files say it.

    Returns:
        The description, and the newest job that trains.
    """
    with run.refreshed():
        known = run.metric_names()
        present = [metric for metric in MAIN_METRICS if metric in known]
        several = [metric for metric in present if len(run.points(metric).steps) > 1]
        metric = next(iter([*several, *present]), None)
        points = [] if metric is None else curve(run, metric)
        findings = run.jobs.findings[-_FINDINGS:][::-1]
        times = run.times()
        steps = run.steps().tolist()
        training = curve(run, TRAINING_REWARD) if TRAINING_REWARD in known else []
        walls = run.points(STEP_SECONDS)
        training_job = next((job for job in run.jobs.newest if job.kind in TRAINING_KINDS), None)
    registered = run.database.read(
        "SELECT base_model, step, created_at FROM models WHERE project = ? AND name = ?", (run.project, run.name)
    )
    base_model, step, created_at = registered[0] if registered else (None, None, None)
    ((num_rollouts,),) = run.indexer.store.read("SELECT total(num_rollouts) FROM files WHERE run = ?", (run.number,))
    seed, seed_group = seed_of(run.recorded_settings())
    if step is None:  # not registered here: what is on the disk says it
        with contextlib.suppress(OSError):
            steps += list_steps(run.paths.checkpoints)
        step = max(steps, default=0)
    changed = [moment for path in (run.paths.history, run.paths.costs) if (moment := _stat(path)[1] / 1e9)]
    moments = [*times.values(), *(min(moment, time.time()) for moment in changed)]
    # Median seconds from one of the newest steps to the next.
    newest = sorted(times)[-_PACE_STEPS - 1 :]
    passed = [(times[later] - times[earlier]) / (later - earlier) for earlier, later in itertools.pairwise(newest)]
    passed = [seconds for seconds in passed if seconds > 0]
    seconds = float((walls.means * walls.counts).sum()) if len(walls.steps) else None
    if seconds is None and len(times) > 1:
        seconds = max(times.values()) - min(times.values())
    summary = run_answers.RunSummary(
        headline=measure_change(run), project=run.project, name=run.name, base_model=base_model, state="finished",
        step=int(step), num_rollouts=int(num_rollouts), reward=_newest(metric, points), seconds=seconds,
        training_reward=_newest(TRAINING_REWARD, training), seed=seed, seed_group=seed_group,
        spark=as_series(metric, thin(points, _SPARK_POINTS)) if metric and points else None, main_metric=metric,
        seconds_per_step=statistics.median(passed) if passed else None, costs_usd=total_usd(run.costs()),
        findings=findings, updated_at=max(moments, default=created_at or None),
        started_at=created_at or min(times.values(), default=None),
    )  # fmt: skip
    return summary, training_job


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder whose names can be those of projects and models."""
    paths = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(InvalidRequestError, OSError):
                if entry.is_dir() and validate_name(entry.name, param="name"):
                    paths.append(Path(entry.path))
    return paths


_UNITS = (
    ("_usd", "USD"), ("_per_s", "per second"), ("_s", "s"), ("_sec", "s"), ("_bytes", "bytes"), ("_share", "share"),
    ("_rate", "share"), ("_tokens", "tokens"), ("_per_rollout", "per rollout"),
)  # fmt: skip


def detail(run: RunFiles, summary: run_answers.RunSummary, files: dict[Place, FileState]) -> run_answers.RunDetail:
    """Describe one run.

    Args:
        files: the files on the disk that have its rollouts.
    """
    banded = banded_metrics(run)
    with run.refreshed():
        names = sorted({*run.metric_names(), *banded})
        metrics = [
            run_answers.RunMetric(
                name=name, unit=unit_of(name), meaning=meaning_of(name), num_points=len(run.points(name).steps),
                has_band=name in banded,
            )
            for name in names
        ]  # fmt: skip
        findings, jobs = run.jobs.findings[::-1], run.jobs.newest
    steps: dict[str, list[int]] = defaultdict(list)
    for split, step in files:
        steps[split].append(step)
    recorded = run.recorded_settings()
    rows = run.database.read("SELECT settings FROM models WHERE project = ? AND name = ?", (run.project, run.name))
    try:
        settings = ModelSettings.model_validate_json(rows[0][0]).model_dump(mode="json", exclude_defaults=True)
    except (IndexError, ValidationError):  # not registered here, or of another version
        settings = {}
    return run_answers.RunDetail(
        **summary.model_dump(), metrics=metrics, all_findings=findings, jobs=jobs,
        splits=[run_answers.SplitSteps(split=split, steps=ranges(numbers)) for split, numbers in sorted(steps.items())],
        settings={**recorded.pop("settings", {}), **settings, **recorded},
    )  # fmt: skip


def unit_of(name: str) -> str | None:
    """Return the unit of a metric, which its name ends or begins with."""
    if name.startswith("costs/"):
        return "USD"
    if name.startswith(("data/step_tokens/", "data/cum/tokens/", "ledger/")):
        return "tokens"
    if name.startswith(("time/step_s/", "time/cum/")):
        return "s"
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), None)


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Join numbers to ranges without gaps. Example: 1, 2, 3, 7 give (1, 3), (7, 7)."""
    joined: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if joined and number <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], number)
        else:
            joined.append((number, number))
    return joined


class Viewer:
    """Answers what the page asks about a data directory.

    Every method that takes `project` and `name` raises `NotFoundError` for a run, step, group, rollout, path or node
    that does not exist, and `InvalidRequestError` for a name that is no name.
    """

    def __init__(
        self,
        data_dir: DataDir,
        *,
        index_path: Path | None = None,
        activity: Callable[[str, str], Activity | None] | None = None,
    ) -> None:
        """
        Args:
            index_path: file of the index of rollouts; by default `.viewer.db` in the data directory, or a file in the
                user's cache folder where the directory cannot be written.
            activity: says what the server in this process, if one runs, does for a project and name. It may be called
                from any thread, and does not block.
        """
        self.data_dir = data_dir
        self.database = ReadOnlyDatabase(data_dir.database)
        self._tokens = TokenReader(self.database)
        self.store = IndexStore(index_path or data_dir.viewer_index)
        self.indexer = Indexer(self.store, data_dir)
        self._activity = activity
        self._files = functools.lru_cache(maxsize=MOST_KEPT)(
            lambda project, name: RunFiles(project, name, data_dir.model(project, name), self.database, self.indexer)
        )
        self._lines: dict[tuple[str, str], tuple[str, run_answers.RunSummary, run_answers.RunJob | None]] = {}

    def close(self) -> None:
        """End indexing and close the files."""
        self.indexer.close()
        self.store.close()

    def complete(self) -> None:
        """Wait until the rollouts of all runs are indexed, as far as their files can be read."""
        for names in list_names(self.data_dir, self.database):
            before = None
            while (now := self.indexer.ensure(*names, wait_s=COMPLETE_WAIT_S)[1]) is not None and now != before:
                before = now

    def run_files(self, project: str, name: str) -> RunFiles:
        """Return the files of a run, with what was read of them before."""
        if not self.data_dir.model(project, name).root.is_dir() and not self.database.read(
            "SELECT 1 FROM models WHERE project = ? AND name = ?", (project, name)
        ):
            raise NotFoundError(f"there is no run {project}/{name} in this data directory", param="name")
        return self._files(project, name)

    def version(self, project: str | None = None, name: str | None = None) -> str:
        """Return a text that changes when an answer about the run can change; of all runs without a name. It is made
        of sizes and times of files, and costs no more than looking at them.
        """
        names = [(project, name)] if project and name else list_names(self.data_dir, self.database, project)
        states: list[object] = [_stat(Path(f"{self.data_dir.database}{suffix}")) for suffix in ("", "-wal")]
        if project is None:
            states += [_stat(path) for path in comparison_files(self.data_dir)]
        for each in names:
            paths = self.data_dir.model(*each)
            files = (
                paths.history,
                paths.costs,
                paths.state,
                paths.settings,
                paths.labels,
                paths.checkpoints,
                paths.steps,
            )
            states += [_stat(path) for path in (*files, paths.root / "trajectories" / TRAIN)]
        for activity in (self._activity(*each) for each in names if self._activity is not None):
            if activity is not None:  # what changes when something happens, and not with every second
                states.append([(job.kind, job.runs, job.progress, job.queue_place) for job in activity.jobs])
                states.append((activity.num_requests, activity.num_sampling))
                states.append((activity.engine, activity.engine_sleeps, activity.trainer))
        digest = hashlib.blake2b(repr(states).encode(), digest_size=12).hexdigest()
        return f"{self.indexer.num_changes}-{self._is_used():d}-{digest}"

    def runs(self, project: str | None = None) -> run_answers.RunList:
        """List all runs, or those of one project."""
        runs = [self._summary(*names) for names in list_names(self.data_dir, self.database, project)]
        runs.sort(key=lambda run: (-(run.updated_at or 0.0), run.project, run.name))
        return run_answers.RunList(runs=runs, groups=find_groups(runs), now=time.time())

    def run(self, project: str, name: str) -> run_answers.RunDetail:
        """Describe one run: its state, findings, settings, jobs, and the names of its metrics."""
        summary = self._summary(project, name)
        return self._read(project, name, lambda run, _: detail(run, summary, self.indexer.files(project, name)))

    def series(self, project: str, name: str, query: run_answers.SeriesQuery) -> run_answers.SeriesAnswer:
        """Return curves of metrics."""
        return self._read(project, name, lambda run, _: read_series(run, query))

    def rollouts(self, project: str, name: str, query: RolloutTableQuery) -> RolloutTable:
        """List the rollouts that match a query."""
        places = places_of(query)
        return self._read(
            project, name, lambda run, indexing: list_rollouts(run, query, None if places else indexing), places,
            wait_s=0.0 if places else INDEX_WAIT_S,
        )  # fmt: skip

    def rollout(self, project: str, name: str, key: RolloutKey) -> RolloutDetail:
        """Describe one rollout."""
        return self._read(project, name, lambda run, _: read_rollout(run, key), [(key.split, key.step)])

    def group(self, project: str, name: str, split: str, step: int, group: int) -> GroupAnswer:
        """Describe the rollouts of one scenario side by side."""
        return self._read(project, name, lambda run, _: read_group(run, split, step, group), [(split, step)])

    def tokens(self, project: str, name: str, key: RolloutKey, query: TokensQuery) -> RolloutTokens:
        """Describe the exact tokens of one path of a rollout."""
        return self._read(project, name, lambda run, _: self._tokens.rollout(run, key, query), [(key.split, key.step)])

    def request(self, project: str, name: str, key: RolloutKey, query: RequestQuery) -> RepeatedRequest:
        """Return a request that gives an answer of a rollout again."""
        return self._read(
            project, name, lambda run, _: repeated_request(run, self.database, key, query.exchange),
            [(key.split, key.step)],
        )  # fmt: skip

    def tree(self, project: str, name: str, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained."""
        return self._read(project, name, lambda run, _: self._tokens.tree(run, step, query), tree_places(step))

    def step(self, project: str, name: str, step: int) -> run_answers.StepDetail:
        """Describe one step."""
        return self._read(project, name, lambda run, _: describe_step(run, step), [(TRAIN, step)])

    def ledger(
        self, project: str, name: str, first: int | None = None, last: int | None = None
    ) -> run_answers.LedgerAnswer:
        """Sum the ledgers of steps from `first` to `last`, both included."""
        return sum_ledgers(self.run_files(project, name), first, last)

    def checkpoints(self, project: str, name: str) -> run_answers.RunCheckpoints:
        """List the checkpoints on the disk."""
        return self._read(project, name, lambda run, _: list_checkpoints(run), wait_s=INDEX_WAIT_S)

    def compare(self, project: str, name: str, query: run_answers.CompareQuery) -> run_answers.StepComparison:
        """Compare the rewards of two steps scenario by scenario."""
        return self._read(
            project, name, lambda run, _: compare_steps(run, query), [(query.split, query.a), (query.split, query.b)]
        )

    def costs(self, project: str, name: str) -> run_answers.CostsAnswer:
        """Return what the run has cost, by source and step."""
        return describe_costs(self.run_files(project, name).costs())

    def comparisons(self) -> run_answers.ComparisonList:
        """List the comparisons of models that were made in the data directory."""
        lines, unreadable = [], []
        for file in comparison_files(self.data_dir):
            try:
                comparison = read_comparison(file.parent)
            except (OSError, ValueError):
                unreadable.append(file.parent.name)
                continue
            scored = {row.label: row.headline.mean for row in comparison.models if row.headline is not None}
            line = run_answers.ComparisonLine(
                id=comparison.id, task=comparison.task, description=comparison.description,
                models=comparison.models, reference=comparison.reference,
                best=max(scored, key=scored.__getitem__, default=None),
                headline_metric=comparison.headline_metric, num_scenarios=comparison.num_scenarios,
                updated_at=comparison.updated_at, is_complete=comparison.is_complete,
            )  # fmt: skip
            lines.append(line)
        lines.sort(key=lambda line: -line.updated_at)
        return run_answers.ComparisonList(comparisons=lines, unreadable=unreadable)

    def comparison(self, comparison: str) -> run_answers.ComparisonAnswer:
        """Return one comparison of models.

        Raises:
            NotFoundError: there is none of this name, or its file cannot be read.
        """
        folder = self.data_dir.comparisons / validate_name(comparison, param="comparison")
        try:
            content = read_comparison(folder)
        except OSError:
            problem = f"there is no comparison {comparison!r} in this data directory"
        except ValueError:
            problem = f"the file {JSON_FILE} of {comparison!r} is damaged, or of another version of ART"
        else:
            return run_answers.ComparisonAnswer(comparison=content, remarks=remarks(content))
        raise NotFoundError(problem, param="comparison")

    def label(self, project: str, name: str, changes: LabelChanges) -> RunLabels:
        """Replace tags, notes, star or archive mark of a run, and return all of them.

        Raises:
            StorageError: the directory cannot be written.
        """
        return set_labels(self.run_files(project, name).paths, **changes.model_dump(exclude_none=True))

    # -- inside --

    def _read(
        self,
        project: str,
        name: str,
        answer: Callable[[RunFiles, Indexing | None], T],
        places: Sequence[Place] = (),
        *,
        wait_s: float = 0.0,
    ) -> T:
        """Bring the index of a run up to date, and answer from it."""
        run = self.run_files(project, name)
        run.number, indexing = self.indexer.ensure(project, name, places=places, wait_s=wait_s)
        return answer(run, indexing)

    def _summary(self, project: str, name: str) -> run_answers.RunSummary:
        """Describe a run in one line, with what happens at this moment."""
        summary, job = self._read(project, name, self._line)
        paths = self.data_dir.model(project, name)
        num_steps, end = read_course(paths)
        facts = RunFacts(
            step=summary.step, seconds_per_step=summary.seconds_per_step, num_steps=num_steps, training_job=job,
            is_used=self._is_used(), end=end if end is not None and end.step == summary.step else None,
        )  # fmt: skip
        now = describe_run(facts, None if self._activity is None else self._activity(project, name))
        updated = [moment for moment in (summary.updated_at, job and (job.ended_at or job.started_at)) if moment]
        changes = {
            **now._asdict(), "updated_at": max(updated, default=None), "num_steps": num_steps,
            "outcome": describe_outcome(facts, now.state, summary.headline), "labels": read_labels(paths),
        }  # fmt: skip
        return summary.model_copy(update=changes)

    def _line(
        self, run: RunFiles, indexing: Indexing | None
    ) -> tuple[run_answers.RunSummary, run_answers.RunJob | None]:
        """Describe a run by its files. The line is kept until one of them changes."""
        paths = (run.paths.history, run.paths.costs, run.paths.checkpoints, run.paths.settings)
        files = self.store.read("SELECT count(*), max(id) FROM files WHERE run = ?", (run.number,))
        sql = "SELECT rowid, state FROM jobs WHERE project = ? AND name = ? ORDER BY rowid DESC LIMIT 3"
        jobs = self.database.read(sql, (run.project, run.name))
        version = repr((files, jobs, [_stat(path) for path in paths]))
        kept = self._lines.get((run.project, run.name))
        if kept is None or kept[0] != version:
            kept = self._lines[run.project, run.name] = (version, *summarize(run))
        return kept[1].model_copy(update={"indexing": indexing}), kept[2]

    def _is_used(self) -> bool:
        """Whether a server uses the directory."""
        try:
            return lock_holder(self.data_dir.lock) is not None
        except OSError:  # the directory cannot be written, so no server runs in it
            return False


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def comparison_files(data_dir: DataDir) -> list[Path]:
    """Return the files of all comparisons. A link is not followed, since it may lead to a private file."""
    return sorted(path for path in data_dir.comparisons.glob(f"*/{JSON_FILE}") if not path.is_symlink())
