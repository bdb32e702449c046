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


def identify(scope: Scope, server_key: bytes) -> Caller:
    """The caller by the request's key.

    Raises:
        AuthenticationError: no key, or an unknown one.
    """
    scheme, _, key = _authorization(scope).partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), server_key):
        return Caller(SERVER_KEY_ID, None, frozenset({"admin"}))
    problem = "the API key is wrong" if scheme else "the API key is missing"
    raise AuthenticationError(f"{problem}; send the server's key as `Authorization: Bearer <key>`")


def _authorization(scope: Scope) -> bytes:
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return value
