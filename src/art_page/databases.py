"""The two databases of the page: that of the server, which is only read, and its own index of rollouts.

Of the index: where it lies, its tables, its connections, and the language of searches in it.

    runs -1:n- files -1:n- rollouts -1:1- words (FTS5, without the texts themselves)
                    `-1:n- sums (of rewards and metrics, for intervals)

A file is `trajectories/<split>/<step>.jsonl`. The index can be deleted while nobody shows the page. One that is damaged
when it is opened, or of an older form, is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from art.errors import StorageError
from art.storage.database import check_format

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABSENT = ("no such table", "no such column")
FORMAT = 4
"""Number of the tables' form. An index of another form is made again."""
BUSY_TIMEOUT_S = 10.0
_RESTART = "restart what shows the page, `art view` or the server"
SORTED = ("reward", "advantage", "num_tokens", "num_turns", "started_at", "duration_s", "judge_score")
"""Columns by which the table of rollouts can be sorted. Each has an index."""
FILTERED = ("outcome", "stop", "dropped", "scenario")
"""Columns by which it can be filtered, and in which most values are rare."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (project, name)
);
CREATE TABLE IF NOT EXISTS files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL,
    size INTEGER NOT NULL, changed_ns INTEGER NOT NULL, plan_ns INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, num_rollouts INTEGER NOT NULL,
    UNIQUE (run, split, step)
);
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, file INTEGER NOT NULL, split TEXT NOT NULL,
    step INTEGER NOT NULL, grp INTEGER NOT NULL, idx INTEGER NOT NULL, place INTEGER NOT NULL, length INTEGER NOT NULL,
    scenario TEXT, scenario_key INTEGER NOT NULL, reward REAL, num_turns INTEGER NOT NULL, num_tokens INTEGER,
    stop TEXT, outcome TEXT NOT NULL, started_at REAL, duration_s REAL, policy_version INTEGER, judge_score REAL,
    first_exchange TEXT, metrics TEXT, advantage REAL, trained INTEGER, dropped TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS rollouts_in_place ON rollouts (file, grp, idx);
CREATE INDEX IF NOT EXISTS rollouts_newest ON rollouts (run, step DESC, id ASC);
CREATE INDEX IF NOT EXISTS rollouts_oldest ON rollouts (run, step ASC, id ASC);
CREATE TABLE IF NOT EXISTS sums (
    file INTEGER NOT NULL, metric TEXT NOT NULL, clusters REAL NOT NULL, n REAL NOT NULL, s REAL NOT NULL,
    xx REAL NOT NULL, ss REAL NOT NULL, sn REAL NOT NULL, nn REAL NOT NULL, PRIMARY KEY (file, metric)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS choices (
    run INTEGER NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run, kind, value)
) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='', columnsize=0, tokenize='unicode61');
""" + "".join(
    f"CREATE INDEX IF NOT EXISTS rollouts_by_{name} ON rollouts (run, {name});\n" for name in (*SORTED, *FILTERED)
)


class ReadOnlyDatabase:
    """Runs queries on a SQLite file that other processes may write. It never writes and holds no lock between queries.

    Any thread may ask. The file, or a table of it, may be missing: a directory that no server has used has no database,
    and an older one lacks later tables.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the file, a table or a column is missing, or the file is damaged.

        Raises:
            ConfigError: a newer version of ART has written the file.
        """
        if not self.path.exists():
            return []
        # A write-ahead log cannot be joined in a folder that may not be written; `immutable` reads the file without it.
        for how in ("mode=ro", "mode=ro&immutable=1"):
            address = f"file:{quote(str(self.path))}?{how}"
            try:
                with contextlib.closing(sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
                    check_format(connection, self.path)
                    return connection.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                problem = error
                if str(error).startswith(_ABSENT):
                    return []
        logger.warning("cannot read %s: %s", self.path, problem)
        return []


class IndexStore:
    """Opens the index's file and runs queries and transactions on it. Threads and processes may share the file."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file. Where it cannot be written, a file in the user's cache folder takes its place.
        """
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self.path = self._choose(path)
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

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one query or transaction.

        Raises:
            StorageError: the index cannot be read or written, or somebody has deleted or replaced it.
        """
        if inode_of(self.path) != self._inode:
            raise StorageError(f"the index of rollouts {self.path} was deleted or replaced; {_RESTART}")
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or _open(self.path)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, sqlite3.Error):
                raise
            advice = f"; delete it, and {_RESTART}" if _is_damage(error) else ""
            raise StorageError(f"the index of rollouts {self.path} cannot be used: {error}{advice}") from error
        with self._lock:
            self._idle.append(connection)

    def _choose(self, first: Path) -> Path:
        problem: Exception | None = None
        for in_cache in (False, True):
            try:
                path = first
                if in_cache:
                    name = hashlib.sha256(os.fsencode(first.absolute().parent)).hexdigest()[:24]
                    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
                    path = folder / "art" / "viewer" / f"{name}.db"
                path.parent.mkdir(parents=True, exist_ok=True)
                if in_cache:  # there the folder does not keep others away from the texts
                    path.touch(mode=0o600)
                try:
                    _open(path).close()
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    logger.warning("the index %s is damaged (%s) and is made again", path, error)
                    _delete(path)
                    _open(path).close()
                return path
            except (sqlite3.Error, OSError, RuntimeError) as error:  # RuntimeError: the user has no home
                problem = error
        raise StorageError(f"no place for an index of {first.parent} can be written ({problem}); set XDG_CACHE_HOME")


def _open(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        ((form,),) = connection.execute("PRAGMA user_version").fetchall()
        if form not in (0, FORMAT):
            logger.info("the index %s has another form and is made again", path)
            connection.close()
            _delete(path)
            connection, form = _connect(path), 0
        if form == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version={FORMAT};COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA cache_size=-8000")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def inode_of(path: Path) -> int:
    """Return the number of the file that a path names; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


_MAX_TEXT = 1_000_000
"""Characters of one rollout that a search sees."""
_SYLLABLES = re.compile("([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
"""Scripts without spaces between words: kana and Han characters. Each character is a word of its own."""
_PIECES = re.compile(r'"([^"]*)"?|(\S+)')
_MOST_PIECES = 32


def searchable(text: str) -> str:
    """Prepare a text for the index of words."""
    text = text[:_MAX_TEXT]
    return text if text.isascii() else _SYLLABLES.sub(r" \1 ", text)


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
