"""Who calls: `Authorization: Bearer <key>`, and what that key may do.

401  no key, or a wrong one
403  a key that may not do this: another scope, another project in the URL or in the body
404  a job or model that is another project's, when it is named by its id: as if it were not there
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from art.errors import AuthenticationError, PermissionDeniedError
from art.protocol.keys import KeyScope
from art.server.asgi import Scope
from art.storage.keys import KeyStore


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    key_id: str
    project: str | None
    """The only one that the key is for; `None`: all."""
    scopes: frozenset[KeyScope]
    """Empty for a request without a key, to a route that needs none."""

    def may(self, scope: KeyScope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def check_scope(self, scope: KeyScope) -> None:
        """
        Raises:
            PermissionDeniedError: the key is for something else.
        """
        if not self.may(scope):
            has = ", ".join(sorted(self.scopes)) or "nothing"
            raise PermissionDeniedError(f"this needs a key with scope `{scope}`; key {self.key_id} has {has}")

    def check_project(self, project: str) -> None:
        """
        Raises:
            PermissionDeniedError: the key is for another project.
        """
        if self.project not in (None, project):
            raise PermissionDeniedError(
                f"key {self.key_id} is for project {self.project!r}, not for {project!r}", param="project"
            )


ANONYMOUS = Caller("none", None, frozenset())
SERVER_KEY_ID = "server"
"""Of the key that the server was started with."""


SERVER = Caller(SERVER_KEY_ID, None, frozenset({"admin"}))


class Keyring:
    """The key that the server was started with, which may do everything, and those of `art keys`."""

    def __init__(self, server_key: str, store: KeyStore | None = None) -> None:
        self._server_key = server_key.encode()
        self._store = store

    def identify(self, scope: Scope) -> Caller:
        """The caller by the request's key.

        Raises:
            AuthenticationError: no key, or one that opens nothing.
        """
        given = _given_key(scope)
        if given is None:
            raise AuthenticationError(f"the API key is missing; {_HOW}")
        if hmac.compare_digest(given, self._server_key):
            return SERVER
        if self._store is None:
            raise AuthenticationError(f"the API key is wrong; {_HOW}")
        key = self._store.find(given.decode("latin-1"))
        self._store.note_use(key)
        return Caller(key.id, key.project, key.scopes)


_HOW = "send one as `Authorization: Bearer <key>`"


def _given_key(scope: Scope) -> bytes | None:
    """Anthropic's clients send the key as `x-api-key`, all others as a bearer token."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return bytes(key.strip())
        elif name == b"x-api-key":
            return bytes(value.strip())
    return None
