"""`Viewer`: every answer of the page. The server's routes and `art view` call nothing else.

    viewer = Viewer(DataDir(Path(".art")))
    viewer.runs().runs[0].step
    viewer.rollouts("games", "agent-001", RolloutQuery(step=12, sort="reward")).rows

Methods block on files; call them in a thread. Any number of threads may share a viewer. It only reads: the one thing
that it writes is its index of rollouts, which can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from art.errors import NotFoundError, StorageError
from art.protocol.live.activity import Activity
from art.report.model_comparison import JSON_FILE, ModelComparison, read_comparison, remarks
from art.storage.layout import DataDir, ModelPaths, validate_name
from art.storage.lock import lock_holder
from art.viewer.checkpoints import compare_steps, list_checkpoints
from art.viewer.curves import describe_step, read_series, sum_ledgers
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import TRAIN, Place
from art.viewer.index.indexing import Indexer
from art.viewer.index.store import IndexStore
from art.viewer.live_state import LiveState
from art.viewer.rollout_answers import (
    GroupAnswer,
    Indexing,
    RolloutDetail,
    RolloutKey,
    RolloutPage,
    RolloutQuery,
    RolloutTokens,
    TokensQuery,
    TreeAnswer,
    TreeQuery,
)
from art.viewer.rollouts import list_rollouts, places_of, read_group, read_rollout
from art.viewer.run_answers import (
    CheckpointList,
    CompareQuery,
    Comparison,
    ComparisonAnswer,
    ComparisonLine,
    ComparisonList,
    CostsAnswer,
    LedgerAnswer,
    RunDetail,
    RunList,
    RunSummary,
    SeriesAnswer,
    SeriesQuery,
    StepDetail,
)
from art.viewer.run_files import CostsFile, HistoryFile, JobTable, RunCache, RunFiles, describe_costs
from art.viewer.runs import RunLine, add_state, detail, list_names, summarize
from art.viewer.tokens.reader import TokenReader, tree_places

T = TypeVar("T")

INDEX_WAIT_S = 0.2
"""An answer that needs the whole index waits this long for it, and then says how far it has got."""
LOCK_S = 2.0
"""Whether a server uses the directory is looked up this often."""


class Viewer:
    """Answers what the page asks about a data directory.

    Every method that takes `project` and `name` raises `NotFoundError` for a run that does not exist, and
    `InvalidRequestError` for a name that is no name.
    """

    def __init__(
        self,
        data_dir: DataDir,
        *,
        index_path: Path | None = None,
        indexing_share: float = 1.0,
        live: LiveState | None = None,
    ) -> None:
        """
        Args:
            index_path: file of the index of rollouts; by default `.viewer.db` in the data directory, or a file in the
                user's cache folder where the directory cannot be written.
            indexing_share: largest share of a core that indexing in the background takes, above 0 and at most 1.
            live: the server that runs in this process, if one does.
        """
        self.data_dir = data_dir
        self.database = ReadOnlyDatabase(data_dir.database)
        self._tokens = TokenReader(self.database)
        self.store = IndexStore(index_path or data_dir.viewer_index)
        self.indexer = Indexer(self.store, self.database, data_dir, share=indexing_share)
        self.live = live
        self._runs = RunCache(self._open)
        self._lock = threading.Lock()
        self._used = (-LOCK_S, False)

    def close(self) -> None:
        """End indexing and close the files."""
        self.indexer.close()
        self.store.close()
        self.database.close()

    def run_paths(self, project: str, name: str) -> ModelPaths:
        """Return the paths of a run.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: `project` or `name` is no name.
        """
        paths = self.data_dir.model(project, name)
        if not paths.root.is_dir() and not self.database.read(
            "SELECT 1 FROM models WHERE project = ? AND name = ?", (project, name)
        ):
            raise NotFoundError(f"there is no run {project}/{name} in this data directory", param="name")
        return paths

    def run_files(self, project: str, name: str) -> RunFiles:
        """Return the files of a run, as `run_paths` does, with what was read of them before."""
        self.run_paths(project, name)
        return self._runs.get(project, name)

    def version(self, project: str | None = None, name: str | None = None, *, of_log: bool = False) -> str:
        """Return a text that changes when an answer about the run can change; of all runs without a name. It is made
        of sizes and times of files, and costs no more than looking at them.

        Args:
            of_log: for an answer that is made of files, jobs and the index only. It does not change with every
                request to the model, as the state of the server and its record of exchanges do.
        """
        names = [(project, name)] if project and name else list_names(self.data_dir, self.database, project)
        if of_log:
            jobs = (
                "SELECT count(*), max(rowid), group_concat(state) FROM (SELECT rowid, state FROM jobs "
                "WHERE project = ? AND name = ? ORDER BY rowid DESC LIMIT 20)"
            )
            states: list[object] = [self.database.read(jobs, each) for each in names]
        else:
            states = [_stat(Path(f"{self.data_dir.database}{suffix}")) for suffix in ("", "-wal")]
        if project is None:
            states += [_stat(path) for path in comparison_files(self.data_dir)]
        for each in names:
            paths = self.data_dir.model(*each)
            files = (paths.history, paths.costs, paths.state, paths.settings, paths.checkpoints, paths.steps)
            states += [_stat(path) for path in (*files, paths.root / "trajectories" / TRAIN)]
        live = [] if self.live is None or of_log else [_happening(self.live.activity(*each)) for each in names]
        digest = hashlib.blake2b(repr((states, live)).encode(), digest_size=12).hexdigest()
        return f"{self.indexer.num_changes}-{self._is_used():d}-{digest}"

    def runs(self, project: str | None = None) -> RunList:
        """List all runs, or those of one project."""
        runs = [self._summary(*names) for names in list_names(self.data_dir, self.database, project)]
        runs.sort(key=lambda run: (-(run.updated_at or 0.0), run.project, run.name))
        return RunList(runs=runs, now=time.time())

    def run(self, project: str, name: str) -> RunDetail:
        """Describe one run."""
        summary = self._summary(project, name)
        return self._read(
            project, name, lambda run, number, _: detail(run, number, summary, self.indexer.files(project, name))
        )

    def series(self, project: str, name: str, query: SeriesQuery) -> SeriesAnswer:
        """Return curves of metrics."""
        return self._read(project, name, lambda run, number, _: read_series(run, number, query))

    def rollouts(self, project: str, name: str, query: RolloutQuery) -> RolloutPage:
        """List the rollouts that match a query."""
        places = places_of(query)
        return self._read(
            project,
            name,
            lambda run, number, indexing: list_rollouts(run, number, query, None if places else indexing),
            places,
            wait_s=0.0 if places else INDEX_WAIT_S,
        )

    def rollout(self, project: str, name: str, key: RolloutKey) -> RolloutDetail:
        """Describe one rollout.

        Raises:
            NotFoundError: there is no such rollout.
        """
        places = [(key.split, key.step)]
        return self._read(project, name, lambda run, number, _: read_rollout(run, number, key), places)

    def group(self, project: str, name: str, split: str, step: int, group: int) -> GroupAnswer:
        """Describe the rollouts of one scenario side by side.

        Raises:
            NotFoundError: there is no such group.
        """
        places = [(split, step)]
        return self._read(project, name, lambda run, number, _: read_group(run, number, split, step, group), places)

    def tokens(self, project: str, name: str, key: RolloutKey, query: TokensQuery) -> RolloutTokens:
        """Describe the exact tokens of one path of a rollout.

        Raises:
            NotFoundError: there is no such rollout, or it has no such path.
        """
        places = [(key.split, key.step)]
        return self._read(project, name, lambda run, number, _: self._tokens.rollout(run, number, key, query), places)

    def tree(self, project: str, name: str, step: int, query: TreeQuery) -> TreeAnswer:
        """Describe the prefix tree of a step as it was trained.

        Raises:
            NotFoundError: nothing is known of the step, or the tree has no such node.
        """
        places = tree_places(step)
        return self._read(project, name, lambda run, number, _: self._tokens.tree(run, number, step, query), places)

    def step(self, project: str, name: str, step: int) -> StepDetail:
        """Describe one step.

        Raises:
            NotFoundError: nothing was logged for the step.
        """
        places = [(TRAIN, step)]
        return self._read(project, name, lambda run, number, _: describe_step(run, number, step), places)

    def ledger(self, project: str, name: str, first: int | None = None, last: int | None = None) -> LedgerAnswer:
        """Sum the ledgers of steps from `first` to `last`, both included."""
        return sum_ledgers(self.run_files(project, name), first, last)

    def checkpoints(self, project: str, name: str) -> CheckpointList:
        """List the checkpoints on the disk."""
        return self._read(project, name, lambda run, number, _: list_checkpoints(run, number), wait_s=INDEX_WAIT_S)

    def compare(self, project: str, name: str, query: CompareQuery) -> Comparison:
        """Compare the rewards of two steps scenario by scenario."""
        places = [(query.split, query.a), (query.split, query.b)]
        return self._read(project, name, lambda run, number, _: compare_steps(run, number, query), places)

    def costs(self, project: str, name: str) -> CostsAnswer:
        """Return what the run has cost, by source and step."""
        run = self.run_files(project, name)
        with run.refreshed():
            return describe_costs(run.costs)

    def comparisons(self) -> ComparisonList:
        """List the comparisons of models that were made in the data directory."""
        return list_comparisons(self.data_dir)

    def comparison(self, name: str) -> ComparisonAnswer:
        """Return one comparison of models.

        Raises:
            NotFoundError: there is none of this name.
        """
        return read_comparison_of(self.data_dir, name)

    # -- inside --

    def _open(self, project: str, name: str) -> RunFiles:
        paths: ModelPaths = self.data_dir.model(project, name)
        return RunFiles(
            project=project,
            name=name,
            paths=paths,
            database=self.database,
            indexer=self.indexer,
            history=HistoryFile(paths.history),
            costs=CostsFile(paths.costs),
            jobs=JobTable(self.database, project, name),
        )

    def _read(
        self,
        project: str,
        name: str,
        answer: Callable[[RunFiles, int, Indexing | None], T],
        places: Sequence[Place] = (),
        *,
        wait_s: float = 0.0,
    ) -> T:
        """Bring the index of a run up to date, and answer from it. An index that breaks meanwhile is made again."""
        run = self.run_files(project, name)
        generation = self.store.generation
        try:
            result = answer(run, *self.indexer.ensure(project, name, places=places, wait_s=wait_s))
        except StorageError:
            if self.store.generation == generation:
                raise
        else:
            if self.store.generation == generation:
                return result
        return answer(run, *self.indexer.ensure(project, name, places=places, wait_s=wait_s))

    def _summary(self, project: str, name: str) -> RunSummary:
        """Describe a run in one line, with what happens at this moment."""
        self.run_paths(project, name)
        kept = self._read(project, name, self._kept_line)
        return add_state(kept, self.data_dir.model(project, name), self.live, is_used=self._is_used())

    def _kept_line(self, run: RunFiles, number: int, indexing: Indexing | None) -> RunLine:
        """Describe a run by its files. The line is kept in the index until one of them changes."""
        paths = run.paths
        version = repr(
            (
                self.store.read(
                    "SELECT count(*), max(id), total(size), total(plan_ns) FROM files WHERE run = ?", (number,)
                ),
                self.database.read(
                    "SELECT rowid, state FROM jobs WHERE project = ? AND name = ? ORDER BY rowid DESC LIMIT 3",
                    (run.project, run.name),
                ),
                [_stat(path) for path in (paths.history, paths.costs, paths.checkpoints, paths.settings)],
            )
        )
        kept = self.store.read("SELECT content FROM summaries WHERE run = ? AND version = ?", (number, version))
        line = _kept(kept[0][0]) if kept else None
        if line is None:
            line = summarize(run, number)
            values = (number, version, line.model_dump_json())
            if indexing is None:  # it changes again in a moment, and writing would wait for the indexing
                self.store.write(lambda db: db.execute("INSERT OR REPLACE INTO summaries VALUES (?, ?, ?)", values))
        return line.model_copy(update={"summary": line.summary.model_copy(update={"indexing": indexing})})

    def _is_used(self) -> bool:
        """Whether a server uses the directory."""
        with self._lock:
            at, is_used = self._used
            if time.monotonic() - at >= LOCK_S:
                try:
                    is_used = lock_holder(self.data_dir.lock) is not None
                except OSError:  # the directory cannot be written, so no server runs in it
                    is_used = False
                self._used = (time.monotonic(), is_used)
            return is_used


def _kept(content: str) -> RunLine | None:
    """Load a line that was kept; `None` for one of another version of ART."""
    try:
        return RunLine.model_validate_json(content)
    except ValidationError:
        return None


def _happening(activity: Activity | None) -> object:
    """The parts of an activity that change when something happens, not with every second."""
    if activity is None:
        return None
    jobs = [(job.kind, job.runs, job.progress, job.queue_place) for job in activity.jobs]
    processes = (activity.engine, activity.engine_sleeps, activity.trainer)
    return jobs, activity.num_requests, activity.num_sampling, processes


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_size, stat.st_mtime_ns)


def comparison_files(data_dir: DataDir) -> list[Path]:
    """Return the files of all comparisons. A link is not followed, since it may lead to a private file."""
    return sorted(path for path in data_dir.comparisons.glob(f"*/{JSON_FILE}") if not path.is_symlink())


def list_comparisons(data_dir: DataDir) -> ComparisonList:
    """List all comparisons."""
    lines, unreadable = [], []
    for file in comparison_files(data_dir):
        try:
            lines.append(_comparison_line(read_comparison(file.parent)))
        except (OSError, ValueError):
            unreadable.append(file.parent.name)
    lines.sort(key=lambda line: -line.updated_at)
    return ComparisonList(comparisons=lines, unreadable=unreadable)


def read_comparison_of(data_dir: DataDir, name: str) -> ComparisonAnswer:
    """Return one comparison.

    Raises:
        NotFoundError: there is none of this name, or its file cannot be read.
    """
    folder = data_dir.comparisons / validate_name(name, param="comparison")
    try:
        comparison = read_comparison(folder)
    except OSError:
        raise NotFoundError(f"there is no comparison {name!r} in this data directory", param="comparison") from None
    except ValueError:
        raise NotFoundError(
            f"the file {JSON_FILE} of the comparison {name!r} is damaged, or of another version of ART",
            param="comparison",
        ) from None
    return ComparisonAnswer(comparison=comparison, remarks=remarks(comparison))


def _comparison_line(comparison: ModelComparison) -> ComparisonLine:
    scored = [row for row in comparison.models if row.headline is not None]
    best = max(scored, key=lambda row: row.headline.mean if row.headline else 0.0, default=None)
    return ComparisonLine(
        id=comparison.id, task=comparison.task, description=comparison.description,
        models=[row.label for row in comparison.models], best=None if best is None else best.label,
        headline_metric=comparison.headline_metric, num_scenarios=comparison.num_scenarios,
        updated_at=comparison.updated_at, is_complete=comparison.is_complete,
    )  # fmt: skip
