"""The API keys of a server, in `<data_dir>/keys.db`. `art keys` makes and revokes them; each request looks one up.

    art_3f9c01d2ab47_J3vX...        43 characters of secret: 256 random bits
        '--- id ---'

Only the SHA-256 of a key is stored, so a stolen file opens nothing. A slow, salted hash is needed for secrets that
people choose and that can be guessed. 256 random bits cannot be guessed, so a fast hash is safe and a look-up is cheap.

The keys have a file of their own, because SQLite tells by a counter whether another process has changed a file, and
that counter would change with each of the many commits to `art.db`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from art.errors import (
    AuthenticationError,
    DiskFullError,
    InvalidRequestError,
    KeysUnavailableError,
    NotFoundError,
    StorageError,
)
from art.protocol.keys import KeyScope
from art.storage.atomic import storage_errors
from art.storage.database import Database
from art.storage.layout import validate_name

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, digest BLOB NOT NULL, name TEXT NOT NULL, project TEXT, scopes TEXT NOT NULL,
    created_at REAL NOT NULL, expires_at REAL, revoked_at REAL, last_used_at REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revoked (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
"""`revoked` lists the keys whose revocation has taken effect: they stay revoked when the clock is set back."""
KEY_PATTERN = re.compile(r"art_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
USE_RESOLUTION_S = 60.0
"""`last_used_at` of a key is written at most once in this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A stored key. Times are in seconds since the epoch."""

    id: str
    digest: bytes
    """SHA-256 of the whole text of the key."""
    name: str
    """Description of the key's use, chosen by the person who made it."""
    project: str | None
    """The only project that the key opens; `None` if it opens all."""
    scopes: frozenset[KeyScope]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    """When the key ends, or ended, because somebody revoked it."""
    last_used_at: float | None = None
    is_revoked: bool = False
    """The revocation has taken effect, whatever the clock says now."""

    def problem(self, now: float) -> str | None:
        """The reason why the key is no longer valid; `None` if it is valid."""
        if self.revoked_at is not None and (self.is_revoked or self.revoked_at <= now):
            return f"key {self.id} was revoked at {format_time(self.revoked_at)}"
        if self.expires_at is not None and self.expires_at <= now:
            return f"key {self.id} expired at {format_time(self.expires_at)}"
        return None


class KeyStore:
    """The keys in one file. Several processes may use it; each sees the changes of the others at its next look-up."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Open or create the file. Only its owner can read a new file.

        Raises:
            StorageError: the file cannot be opened, or is damaged.
        """
        with storage_errors(path, "opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with _open_errors(path):
            self._database = Database(path)
        self._now = now
        self._version = -1
        self._is_damaged = False
        self._keys: dict[str, Key] = {}
        self._ending: dict[str, float] = {}
        """Times of the revocations that have not taken effect, by key."""
        self._noted: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            with _open_errors(path):
                self._database.run_blocking(lambda db: db.executescript(_SCHEMA))
                self.check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._database.close()

    def find(self, text: str) -> Key:
        """Return the key with this text.

        Raises:
            AuthenticationError: there is no such key, or it is expired or revoked.
            KeysUnavailableError: the file is damaged or gone.
        """
        match = KEY_PATTERN.fullmatch(text)
        key = None if match is None else self._current().get(match[1])
        if key is None or not hmac.compare_digest(_digest(text), key.digest):
            raise AuthenticationError("the API key is wrong; this server has no such key")
        return self._checked(key)

    def valid(self, key_id: str) -> Key:
        """Return the key with this id, which has been checked before.

        Raises:
            AuthenticationError: it is gone, expired or revoked.
            KeysUnavailableError: the file is damaged or gone.
        """
        key = self._current().get(key_id)
        if key is None:
            raise AuthenticationError(f"key {key_id} is gone; make another one with `art keys create`")
        return self._checked(key)

    def _checked(self, key: Key) -> Key:
        if problem := key.problem(self._now()):
            raise AuthenticationError(f"{problem}; make another one with `art keys create`")
        return key

    def note_use(self, key: Key) -> None:
        """Record that the key was used. Must be called in an event loop; returns without waiting for the write."""
        now = self._now()
        if now - self._noted.get(key.id, key.last_used_at or 0.0) < USE_RESOLUTION_S:
            return
        self._noted[key.id] = now
        task = asyncio.get_running_loop().create_task(self._write_use(key.id, now), name=f"key-{key.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def list(self) -> list[Key]:
        """List all keys, also expired and revoked ones, oldest first."""
        return sorted(self._current().values(), key=lambda key: key.created_at)

    def create(
        self, name: str, *, project: str | None, scopes: Iterable[KeyScope], expires_at: float | None = None
    ) -> tuple[Key, str]:
        """Make a key. Returns it with its text, which is not stored anywhere.

        Raises:
            InvalidRequestError: there is no scope, the project name is invalid, or the expiry is in the past.
        """
        now, granted = self._now(), frozenset(scopes)
        if not granted:
            raise InvalidRequestError("a key needs at least one scope: infer, train or admin", param="scopes")
        if project is not None:
            validate_name(project, param="project")
        if expires_at is not None and expires_at <= now:
            raise InvalidRequestError("`expires_at` must be in the future", param="expires_at")
        key_id = secrets.token_hex(6)
        text = f"art_{key_id}_{secrets.token_urlsafe(32)}"
        key = Key(
            id=key_id, digest=_digest(text), name=name, project=project, scopes=granted, created_at=now,
            expires_at=expires_at,
        )  # fmt: skip
        self._database.run_blocking(lambda db: _insert(db, key))
        return key, text

    def rotate(self, key_id: str, *, grace_s: float = 0.0) -> tuple[Key, str]:
        """Make a key that replaces another. The old key stays valid for `grace_s` seconds, so that users can switch.

        Raises:
            NotFoundError: there is no such key.
            InvalidRequestError: the key is revoked or expired.
        """
        old, now = self._get(key_id), self._now()
        if problem := old.problem(now):
            raise InvalidRequestError(f"{problem}; make a new one with `art keys create`", param="key_id")
        new, text = self.create(old.name, project=old.project, scopes=old.scopes, expires_at=old.expires_at)
        self._set_revoked(key_id, now + grace_s, is_final=grace_s <= 0)
        return new, text

    def revoke(self, key_id: str) -> Key:
        """Revoke a key now. A key that was already revoked is not changed.

        Raises:
            NotFoundError: there is no such key.
        """
        key, now = self._get(key_id), self._now()
        if key.is_revoked:
            return key
        self._set_revoked(key_id, now, is_final=True)
        return replace(key, revoked_at=now, is_revoked=True)

    def _get(self, key_id: str) -> Key:
        keys = self._current()
        if key_id not in keys:
            raise NotFoundError(f"there is no key {key_id!r}; `art keys list` shows all keys", param="key_id")
        return keys[key_id]

    def _set_revoked(self, key_id: str, at: float, *, is_final: bool) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE keys SET revoked_at = ? WHERE id = ?", (at, key_id))
            if is_final:
                db.execute("INSERT OR IGNORE INTO revoked VALUES (?)", (key_id,))

        self._database.run_blocking(write)

    def _end_due(self) -> None:
        """Make revocations final whose time has come. If that cannot be written, they hold until this process ends."""
        due = [key_id for key_id, at in self._ending.items() if at <= self._now()]
        for key_id in due:
            del self._ending[key_id]
            self._keys[key_id] = replace(self._keys[key_id], is_revoked=True)
        if due:
            try:
                self._database.run_blocking(
                    lambda db: db.executemany("INSERT OR IGNORE INTO revoked VALUES (?)", [(key_id,) for key_id in due])
                )
            except StorageError as error:
                logger.warning("could not record that keys %s are revoked: %s", ", ".join(due), error)

    async def _write_use(self, key_id: str, at: float) -> None:
        try:
            await self._database.run(
                lambda db: db.execute("UPDATE keys SET last_used_at = ? WHERE id = ?", (at, key_id))
            )
        except StorageError as error:
            logger.warning("could not record the last use of key %s: %s", key_id, error)

    def check(self) -> None:
        """Read the whole file.

        Raises:
            KeysUnavailableError: it is damaged or gone.
        """
        self._current()
        try:
            verdict = self._database.read("PRAGMA quick_check(1)")
        except StorageError as error:
            raise self._unavailable(error) from error
        if verdict != [("ok",)]:
            raise self._unavailable(verdict) from StorageError(f"SQLite finds: {verdict[0][0]}")

    def _current(self) -> dict[str, Key]:
        try:
            self._database.check_file()
            # Read the version first: a change between the two queries is then seen next time.
            ((version,),) = self._database.read("PRAGMA data_version")
            if version != self._version:
                rows = self._database.read("SELECT keys.*, id IN (SELECT id FROM revoked) FROM keys")
                self._keys = {row[0]: _to_key(row) for row in rows}
                self._ending = {
                    key.id: key.revoked_at
                    for key in self._keys.values()
                    if key.revoked_at is not None and not key.is_revoked
                }
                self._version = version
            self._end_due()
        except (StorageError, ValueError, TypeError, AttributeError) as error:  # of SQLite, or of a damaged row
            raise self._unavailable(error) from error
        self._is_damaged = False
        return self._keys

    def _unavailable(self, reason: object) -> KeysUnavailableError:
        """Make the error for clients, who are not told where the file is. The log tells it, once."""
        if not self._is_damaged:
            logger.error("the API keys in %s cannot be checked: %s", self._database.path, reason)
        self._is_damaged, self._version = True, -1
        return KeysUnavailableError(
            "this server cannot read its file of API keys, so no key but the one that it was started with can be "
            "checked; tell its operator, whom its log tells more"
        )


@contextlib.contextmanager
def _open_errors(path: Path) -> Iterator[None]:
    """Say whose file cannot be opened, and what to do. The operator may see where it is."""
    try:
        yield
    except DiskFullError:
        raise
    except StorageError as error:
        reason = error.__cause__ if isinstance(error, KeysUnavailableError) else error
        raise StorageError(
            f"the API keys in {path} cannot be read: {reason}. Restore the file from a copy, or move it away and make "
            "new keys with `art keys create`"
        ) from error


def format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _insert(db: sqlite3.Connection, key: Key) -> None:
    db.execute(
        "INSERT INTO keys (id, digest, name, project, scopes, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (key.id, key.digest, key.name, key.project, " ".join(sorted(key.scopes)), key.created_at, key.expires_at),
    )


def _to_key(row: tuple[Any, ...]) -> Key:
    key_id, digest, name, project, scopes, created_at, expires_at, revoked_at, last_used_at, is_revoked = row
    if not isinstance(digest, bytes) or not set(scopes.split()) <= set(get_args(KeyScope)):
        raise ValueError(f"the row of key {key_id!r} is damaged")
    return Key(
        id=key_id, digest=digest, name=name, project=project, scopes=frozenset(scopes.split()), created_at=created_at,
        expires_at=expires_at, revoked_at=revoked_at, last_used_at=last_used_at, is_revoked=bool(is_revoked),
    )  # fmt: skip
