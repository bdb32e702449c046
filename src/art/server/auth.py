"""The server's key: `Authorization: Bearer <key>`."""

from __future__ import annotations

import hmac

from art.errors import AuthenticationError
from art.server.asgi import Scope


def check_key(scope: Scope, expected: bytes) -> None:
    """Compare in constant time.

    Raises:
        AuthenticationError: no key, or another one.
    """
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected):
        return
    problem = "the API key is wrong" if given else "the API key is missing"
    raise AuthenticationError(f"{problem}; send the server's key as `Authorization: Bearer <key>`")
