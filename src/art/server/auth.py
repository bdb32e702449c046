"""The server's key: `Authorization: Bearer <key>`."""

from __future__ import annotations

import hmac

from art.errors import AuthenticationError
from art.server.asgi import Scope


def has_key(scope: Scope, expected: bytes) -> bool:
    """Whether the request brings the key; compares in constant time."""
    scheme, _, key = _authorization(scope).partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)


def check_key(scope: Scope, expected: bytes) -> None:
    """
    Raises:
        AuthenticationError: no key, or another one.
    """
    if has_key(scope, expected):
        return
    problem = "the API key is wrong" if _authorization(scope) else "the API key is missing"
    raise AuthenticationError(f"{problem}; send the server's key as `Authorization: Bearer <key>`")


def _authorization(scope: Scope) -> bytes:
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return value
