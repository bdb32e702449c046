"""The file of the index: where it lies, its tables, its connections, and the language of searches in it.

    runs -1:n- files -1:n- rollouts -1:1- words (FTS5, without the texts themselves)
      |             `-1:n- sums (of rewards and metrics, for intervals)
      `-1:1- summaries (the line in the list of runs, until a file changes)

A file is `trajectories/<split>/<step>.jsonl`, or the plan records of a step whose rollouts nobody logged. The index can
be deleted at any time. One that is damaged, or of an older form, is deleted and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from art.errors import StorageError
from art.viewer.database import inode_of
from art.viewer.index.files import searchable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
"""Number of the tables' form. An index of another form is made again."""
BUSY_TIMEOUT_S = 10.0
_MOST_IDLE = 4
"""Connections that are kept for the next query."""
SORTED = ("reward", "advantage", "num_tokens", "num_turns", "started_at", "duration_s", "judge_score")
"""Columns by which the table of rollouts can be sorted. Each has an index."""
FILTERED = ("outcome", "stop", "dropped", "scenario")
"""Columns by which it can be filtered, and in which most values are rare."""
_SCHEMA = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (project, name));
CREATE TABLE files (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL,
    is_logged INTEGER NOT NULL, size INTEGER NOT NULL, inode INTEGER NOT NULL, changed_ns INTEGER NOT NULL,
    mark BLOB NOT NULL, plan_ns INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, num_rollouts INTEGER NOT NULL, num_damaged INTEGER NOT NULL,
    UNIQUE (run, split, step)
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, file INTEGER NOT NULL, split TEXT NOT NULL,
    step INTEGER NOT NULL, grp INTEGER NOT NULL, idx INTEGER NOT NULL, place INTEGER NOT NULL, length INTEGER NOT NULL,
    scenario TEXT, scenario_key INTEGER NOT NULL, reward REAL, num_turns INTEGER NOT NULL, num_tokens INTEGER,
    stop TEXT, outcome TEXT NOT NULL, started_at REAL, duration_s REAL, policy_version INTEGER, judge_score REAL,
    first_exchange TEXT, advantage REAL, trained INTEGER, dropped TEXT
);
CREATE UNIQUE INDEX rollouts_in_place ON rollouts (file, grp, idx);
CREATE INDEX rollouts_newest ON rollouts (run, step DESC, id ASC);
CREATE INDEX rollouts_oldest ON rollouts (run, step ASC, id ASC);
CREATE TABLE sums (
    file INTEGER NOT NULL, metric TEXT NOT NULL, clusters REAL NOT NULL, n REAL NOT NULL, s REAL NOT NULL,
    xx REAL NOT NULL, ss REAL NOT NULL, sn REAL NOT NULL, nn REAL NOT NULL, PRIMARY KEY (file, metric)
) WITHOUT ROWID;
CREATE TABLE summaries (run INTEGER PRIMARY KEY, version TEXT NOT NULL, content TEXT NOT NULL);
CREATE TABLE choices (run INTEGER NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run, kind, value))
    WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0, tokenize='unicode61');
""" + "".join(f"CREATE INDEX rollouts_by_{name} ON rollouts (run, {name});\n" for name in (*SORTED, *FILTERED))


class IndexStore:
    """Opens the index's file and runs queries and transactions on it. Threads and processes may share the file."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file. Where it cannot be written, a file in the user's cache folder takes its place, or else a
                temporary one.
        """
        self._wanted = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._generation = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.path = self._choose()
        self._inode = inode_of(self.path)

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query. It sees everything committed, and waits for nobody."""
        with self._connection() as connection:
            return connection.execute(sql, parameters).fetchall()

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one transaction. Other writers wait meanwhile."""
        with self._writing, self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

    @property
    def generation(self) -> int:
        """A number that changes when the file was deleted or made again: what is remembered of it no longer holds."""
        self._check_file()
        return self._generation

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
        if self._folder is not None:
            self._folder.cleanup()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one query or transaction.

        Raises:
            StorageError: the index cannot be read or written. A damaged one was deleted; the next call makes it again.
        """
        generation = self._generation
        try:
            connection = self._take()
        except sqlite3.Error as error:
            raise self._translate(error, generation) from error
        try:
            yield connection
        except sqlite3.Error as error:
            connection.close()
            raise self._translate(error, generation) from error
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if generation == self._generation and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _take(self) -> sqlite3.Connection:
        self._check_file()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = _open(self.path)
        with self._lock:
            self._inode = inode_of(self.path)
        return connection

    def _check_file(self) -> None:
        """Notice that somebody has deleted or replaced the file."""
        inode = inode_of(self.path)
        with self._lock:
            if inode != self._inode:
                self._inode = inode
                self._begin_again()

    def _begin_again(self) -> None:
        self._generation += 1
        while self._idle:
            self._idle.pop().close()

    def _translate(self, error: sqlite3.Error, generation: int) -> StorageError:
        if _is_damage(error):
            with self._lock:
                if generation == self._generation:
                    logger.warning("the index %s is damaged (%s) and is made again", self.path, error)
                    self._begin_again()
                    _delete(self.path)
                    self._inode = 0
        return StorageError(f"the index of rollouts {self.path} cannot be used: {error}")

    def _temporary(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="art-viewer-")
        return Path(self._folder.name) / "index.db"

    def _choose(self) -> Path:
        problem: Exception | None = None
        places: list[Callable[[], Path]] = [lambda: self._wanted, lambda: _in_cache(self._wanted), self._temporary]
        for place in places:
            try:
                path = place()
                path.parent.mkdir(parents=True, exist_ok=True)
                if path != self._wanted:  # there the folder does not keep others away from the texts
                    path.touch(mode=0o600)
                _open(path).close()
            except sqlite3.Error as error:
                problem = error
                if _is_damage(error):
                    logger.warning("the index %s is damaged (%s) and is made again", path, error)
                    _delete(path)
                    _open(path).close()
                    return path
            except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
                problem = error
            else:
                return path
        raise StorageError(f"no place for an index of {self._wanted.parent} can be written: {problem}")


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            _create(connection, path)
        connection.execute("PRAGMA cache_size=-8000")
    except BaseException:
        connection.close()
        raise
    return connection


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, in place of those of another form."""
    connection.execute("BEGIN IMMEDIATE")  # also proves that the file can be written
    if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:  # another process may have made them
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        names = [name for (name,) in tables]
        for name in sorted(names, key=lambda name: name != "words"):  # takes the tables of its own with it
            connection.execute(f'DROP TABLE IF EXISTS "{name}"')
        for statement in _SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={FORMAT}")
        if names:
            logger.info("the index %s had another form and is made again", path)
    connection.execute("COMMIT")


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _in_cache(path: Path) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.fsencode(path.absolute().parent)).hexdigest()[:24]
    return folder / "art" / "viewer" / f"{name}.db"


_PIECES = re.compile(r'"([^"]*)"?|(\S+)')
_MOST_PIECES = 32


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split a search into words and phrases; the flag says whether the last word is the beginning of a word.

    Example: `late "no refund" invoi*` gives late, no refund, and invoi with the flag.
    """
    parts = []
    for quoted, word in _PIECES.findall(text)[:_MOST_PIECES]:
        is_prefix = word.endswith("*")
        content = quoted or word.rstrip("*")
        if any(character.isalnum() for character in content):
            parts.append((content, is_prefix))
    return parts


def match_query(text: str) -> str | None:
    """Write a search in the language of FTS5: all words and phrases must occur. `None` if there is no word in it."""
    terms = []
    for content, is_prefix in pieces(text):
        # A quote inside a string is doubled, and nothing else is special there.
        quoted = searchable(content.replace("\0", " ")).replace('"', '""')
        terms.append(f'"{quoted}"' + ("*" if is_prefix else ""))
    return " AND ".join(terms) or None


def find_in(text: str, search: str) -> tuple[int, int] | None:
    """Find the first match of any word or phrase of a search in a text, without regard to case."""
    best: tuple[int, int] | None = None
    lower = text.lower()
    for content, is_prefix in pieces(search):
        words = re.findall(r"\w+", content)
        if not words or not all(word.lower() in lower for word in words):
            continue  # the patterns below are slow on a long text
        pattern = r"(?<!\w)" + r"\W+".join(words) + ("" if is_prefix else r"(?!\w)")
        match = re.search(pattern, text, re.IGNORECASE) or re.search(r"\W*".join(words), text, re.IGNORECASE)
        if match and (best is None or match.start() < best[0]):
            best = match.span()
    return best
