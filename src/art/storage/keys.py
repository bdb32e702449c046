"""The API keys of a server, in `<data_dir>/keys.db`. `art keys` makes and revokes them; each request looks one up.

    art_3f9c01d2ab47_J3vX...        43 characters of secret: 256 random bits
        '--- id ---'

Only the SHA-256 of a key is stored, so a stolen file opens nothing. A slow, salted hash is needed for secrets that
people choose and that can be guessed. 256 random bits cannot be guessed, so a fast hash is safe and a look-up is cheap.

The keys have a file of their own, because SQLite tells by a counter whether another process has changed a file, and
that counter would change with each of the many commits to `art.db`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
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
"""
"""`last_used_at` was written by older versions."""
KEY_PATTERN = re.compile(r"art_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


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
    """When somebody revoked the key, which then stays revoked when the clock is set back."""

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Key:
        """Make a key of a row of the table. Raises `ValueError` if the row is damaged."""
        key_id, digest, name, project, words, created_at, expires_at, revoked_at, _ = row
        scopes = frozenset(words.split())
        if not isinstance(digest, bytes) or not scopes <= set(get_args(KeyScope)):
            raise ValueError(f"the row of key {key_id!r} is damaged")
        return cls(
            id=key_id, digest=digest, name=name, project=project, scopes=scopes, created_at=created_at,
            expires_at=expires_at, revoked_at=revoked_at,
        )  # fmt: skip

    def problem(self, now: float) -> str | None:
        """The reason why the key is no longer valid; `None` if it is valid."""
        if self.revoked_at is not None:
            return f"key {self.id} was revoked at {format_time(self.revoked_at)}"
        if self.expires_at is not None and self.expires_at <= now:
            return f"key {self.id} expired at {format_time(self.expires_at)}"
        return None


class KeyStore:
    """The keys in one file. Several processes may use it; each sees the changes of the others at its next look-up."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Open or create the file. Only its owner can read a new file. Raises `StorageError` if the file cannot be
        opened, or is damaged."""
        self._now = now
        self._version = -1
        self._is_damaged = False
        self._keys: dict[str, Key] = {}
        with storage_errors(path, "opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with contextlib.ExitStack() as opened:
            try:
                self._database = Database(path)
                opened.callback(self.close)
                self._database.run_blocking(lambda db: db.executescript(_SCHEMA))
                self.check()
            except DiskFullError:
                raise
            except StorageError as error:
                reason = error.__cause__ if isinstance(error, KeysUnavailableError) else error
                raise StorageError(
                    f"the API keys in {path} cannot be read: {reason}. Restore the file from a copy, or move it away "
                    "and make new keys with `art keys create`"
                ) from error
            opened.pop_all()

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

    def list(self) -> list[Key]:
        """List all keys, also expired and revoked ones, oldest first."""
        return sorted(self._current().values(), key=lambda key: key.created_at)

    def create(
        self, name: str, *, project: str | None, scopes: Iterable[KeyScope], expires_at: float | None = None
    ) -> tuple[Key, str]:
        """Make a key. Returns it with its text, which is not stored anywhere. Raises `InvalidRequestError` if there is
        no scope, the project name is invalid, or the expiry is in the past."""
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
        row = (key_id, key.digest, name, project, " ".join(sorted(granted)), now, expires_at)
        columns = "id, digest, name, project, scopes, created_at, expires_at"
        self._database.run_blocking(
            lambda db: db.execute(f"INSERT INTO keys ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        )
        return key, text

    def revoke(self, key_id: str) -> Key:
        """Revoke a key now. A key that was already revoked is not changed. Raises `NotFoundError` if there is no such
        key."""
        key = self._current().get(key_id)
        if key is None:
            raise NotFoundError(f"there is no key {key_id!r}; `art keys list` shows all keys", param="key_id")
        if key.revoked_at is not None:
            return key
        now = self._now()
        self._database.run_blocking(lambda db: db.execute("UPDATE keys SET revoked_at = ? WHERE id = ?", (now, key_id)))
        return replace(key, revoked_at=now)

    def check(self) -> None:
        """Read the whole file. Raises `KeysUnavailableError` if it is damaged or gone."""
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
                self._keys = {row[0]: Key.of_row(row) for row in self._database.read("SELECT * FROM keys")}
                self._version = version
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


def format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
