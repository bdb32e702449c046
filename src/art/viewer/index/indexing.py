"""Keeps the index up to date while somebody looks: at once for the step that is asked for, the rest in the background.

Nothing is indexed unless an answer needs it. The background thread begins with the newest step, and ends when all is
indexed or nobody has asked for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from art.errors import StorageError
from art.storage.layout import DataDir, ModelPaths
from art.viewer.database import ReadOnlyDatabase
from art.viewer.index.files import FileState, Place, outline, survey
from art.viewer.index.store import IndexStore
from art.viewer.index.writing import RunWriter
from art.viewer.rollout_answers import Indexing

logger = logging.getLogger(__name__)

SURVEY_S = 0.5
"""A look at the files of a run counts for this long: the parts of a page ask at the same time."""
THOROUGH_S = 10.0
"""Where the folders and the history of a run are as they were, its files are looked at this often."""
PATIENCE_S = 30.0
"""The background thread ends when nobody has asked for this long."""
_AT_ONCE_BYTES = 64 << 20
"""A step that is asked for is indexed before the answer, up to this size."""


@dataclass(slots=True)
class _Run:
    """What is known of one run."""

    number: int
    writer: RunWriter
    generation: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    states: dict[Place, FileState] = field(default_factory=dict)
    """Files on the disk."""
    indexed: dict[Place, FileState] = field(default_factory=dict)
    """State of each file when it was indexed; `size` is what was indexed of it."""
    surveyed_at: float = -THOROUGH_S
    outline: object = None
    """Times of the folders and of the history at the last look."""
    asked_at: float = 0.0
    num_changes: int = 0
    complete: tuple[float, int] | None = None
    """Look at the files and number of changes for which the index was complete."""

    def pending(self) -> list[Place]:
        """Files that are not up to date, the newest step first."""
        places = [place for place, state in self.states.items() if self.is_pending(place, state)]
        return sorted(places, key=lambda place: (place[1], place[0]), reverse=True)

    def is_pending(self, place: Place, state: FileState) -> bool:
        return self.indexed.get(place, FileState())[1:] != state[1:]

    def progress(self) -> Indexing | None:
        """How far the index has got; `None` when it is complete."""
        seen = (self.surveyed_at, self.num_changes)
        if self.complete == seen or not self.pending():
            self.complete = seen
            return None
        done = sum(min(self.indexed.get(place, FileState()).size, state.size) for place, state in self.states.items())
        return Indexing(done_bytes=done, total_bytes=sum(state.size for state in self.states.values()))


class Indexer:
    """Indexes the runs of a data directory on demand. Any thread may ask."""

    def __init__(self, store: IndexStore, database: ReadOnlyDatabase, data_dir: DataDir, *, share: float = 1.0) -> None:
        """
        Args:
            share: largest share of a core that the background thread takes, above 0 and at most 1.
        """
        self.store = store
        self._database = database
        self._data_dir = data_dir
        self._share = share
        self._runs: dict[tuple[str, str], _Run] = {}
        self._lock = threading.Lock()
        self._progressed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.survey_s, self.thorough_s = SURVEY_S, THOROUGH_S
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
        self._survey(run)
        for place in places:
            self._update_at_once(run, place)
        with run.lock:
            progress = run.progress()
        if progress is None:
            return run.number, None
        self._start_thread()
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

    def version(self, project: str, name: str) -> tuple[int, int]:
        """Return numbers that change when the index of a run does."""
        run = self._run(project, name)
        return run.generation, run.num_changes

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
            if run is None or run.generation != self.store.generation:
                run = self._load(project, name)
                self._runs[project, name] = run
            run.asked_at = time.monotonic()
            return run

    def _load(self, project: str, name: str) -> _Run:
        generation = self.store.generation
        find = "SELECT id FROM runs WHERE project = ? AND name = ?"
        rows = self.store.read(find, (project, name))
        if not rows:
            self.store.write(
                lambda db: db.execute("INSERT OR IGNORE INTO runs (project, name) VALUES (?, ?)", (project, name))
            )
            rows = self.store.read(find, (project, name))
        number = rows[0][0]
        paths: ModelPaths = self._data_dir.model(project, name)
        sql = "SELECT split, step, size, inode, changed_ns, plan_ns FROM files WHERE run = ?"
        files = self.store.read(sql, (number,))
        writer = RunWriter(self.store, self._database, paths, number)
        indexed = {(split, step): FileState(*state) for split, step, *state in files}
        return _Run(number, writer, generation, indexed=indexed)

    def _survey(self, run: _Run) -> None:
        with run.lock:
            passed = time.monotonic() - run.surveyed_at
            if passed < self.survey_s or (passed < self.thorough_s and outline(run.writer.paths) == run.outline):
                return
            run.outline = outline(run.writer.paths)
            run.states = survey(run.writer.paths)
            run.surveyed_at = time.monotonic()
            for place in run.indexed.keys() - run.states.keys():
                run.writer.forget(place)
                del run.indexed[place]
                self._note_change(run)

    def _update_at_once(self, run: _Run, place: Place) -> None:
        with run.lock:
            state = run.states.get(place)
            if state is None or state.size - run.indexed.get(place, FileState()).size > _AT_ONCE_BYTES:
                return
            while run.is_pending(place, state):
                self._update(run, place, state)

    def _update(self, run: _Run, place: Place, state: FileState) -> None:
        """Index one chunk of a file. One that cannot be read is tried again when it has changed."""
        with run.lock:
            try:
                run.indexed[place] = run.writer.update(place, state)
            except OSError as error:
                logger.warning("%s cannot be indexed: %s", run.writer.paths.trajectories(*place), error)
                run.indexed[place] = state
            self._note_change(run)

    def _note_change(self, run: _Run) -> None:
        run.num_changes += 1
        self.num_changes += 1

    # -- background --

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                started = time.thread_time()
                self._update(*task)
                with self._progressed:
                    self._progressed.notify_all()
                time.sleep((time.thread_time() - started) * (1 / self._share - 1))
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
