"""Identify the caller by `Authorization: Bearer <key>`, and check what that key may do.

401  the key is missing or wrong
403  the key has another scope, or is for another project than the URL or the body names
404  an id names a job or model of another project: the answer is the same as if it did not exist
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.requests import Request

from art.errors import AuthenticationError, PermissionDeniedError
from art.protocol.keys import KeyScope
from art.storage.keys import Key, KeyStore


@dataclass(frozen=True, slots=True)
class Caller:
    """The API key that sent a request: its id, its project and its scopes."""

    key_id: str
    project: str | None
    """The only project that the key is for; `None` for all projects."""
    scopes: frozenset[KeyScope]
    """Scopes of the key; empty for a request without a key."""

    @classmethod
    def of(cls, key: Key) -> Caller:
        return cls(key.id, key.project, key.scopes)

    def may(self, scope: KeyScope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def check_scope(self, scope: KeyScope) -> None:
        """Raise a `PermissionDeniedError` if the key does not have this scope."""
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes)) or "nothing"
            raise PermissionDeniedError(f"this needs a key with scope `{scope}`; key {self.key_id} has {has}")

    def check_project(self, project: str) -> None:
        """Raise a `PermissionDeniedError` if the key is for another project."""
        if self.project not in (None, project):
            raise PermissionDeniedError(
                f"key {self.key_id} is for project {self.project!r}, not for {project!r}", param="project"
            )


ANONYMOUS = Caller("none", None, frozenset())
SERVER_KEY_ID = "server"
"""Id of the key that the server was started with."""
SERVER = Caller(SERVER_KEY_ID, None, frozenset({"admin"}))


class Keyring:
    """All valid keys: the one that the server was started with, which may do everything, and those of `art keys`."""

    def __init__(self, server_key: str, store: KeyStore | None = None) -> None:
        self._server_key = server_key.encode()
        self._store = store

    def identify(self, request: Request) -> Caller:
        """Find the caller by the API key in the headers of a request.

        Raises:
            AuthenticationError: the key is missing or not valid.
            KeysUnavailableError: the file of the keys cannot be read.
        """
        text = read_key(request)
        if text is None:
            raise AuthenticationError(f"the API key is missing; {_HOW}")
        return self.find(text)

    def find(self, text: bytes) -> Caller:
        """Find the caller by the text of a key. Every comparison takes the same time for right and wrong keys.

        Raises:
            AuthenticationError: the key is not valid.
            KeysUnavailableError: the file of the keys cannot be read.
        """
        if hmac.compare_digest(text, self._server_key):
            return SERVER
        if self._store is None:
            raise AuthenticationError(f"the API key is wrong; {_HOW}")
        return Caller.of(self._store.find(text.decode("latin-1")))

    def caller(self, key_id: str) -> Caller:
        """Return what the key with this id may do now, for a session that it has opened.

        Raises:
            AuthenticationError: the key was revoked, or has expired.
            KeysUnavailableError: the file of the keys cannot be read.
        """
        if key_id == SERVER_KEY_ID:
            return SERVER
        if self._store is None:
            raise AuthenticationError(f"key {key_id} is gone")
        return Caller.of(self._store.valid(key_id))

    def check(self) -> None:
        """Raise a `KeysUnavailableError` if the file of the keys cannot be read."""
        if self._store is not None:
            self._store.check()


_HOW = "set ART_API_KEY for programs that use ART; others send `Authorization: Bearer <key>`"


def read_key(request: Request) -> bytes | None:
    """Read the key from the headers: Anthropic's clients send it as `x-api-key`, all others as a bearer token."""
    for name, value in request.headers.raw:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return bytes(key.strip())
        elif name == b"x-api-key":
            return bytes(value.strip())
    return None
