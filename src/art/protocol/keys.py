"""Scopes of API keys, which characters a key may have, and the link by which a key opens the page."""

from __future__ import annotations

from typing import Literal

from art.errors import ConfigError
from art.protocol.training import Wire

KeyScope = Literal["infer", "train", "admin"]
"""`infer`: sample from models and read records. `train`: register models, train them, manage their checkpoints.
`admin`: everything, with settings that touch the machine: devices, paths, addresses and flags of engines."""


def check_api_key(key: str) -> str:
    """Return the key if an HTTP header can carry it. Else it is a `ConfigError`, which does not show the key."""
    place = next((i for i, character in enumerate(key) if not "!" <= character <= "~"), None)
    if place is None:
        return key
    other = "a control character" if key[place].isascii() else "a character outside of ASCII"
    what = {"\n": "a line break", "\r": "a line break", " ": "a space"}.get(key[place], other)
    problem = f"the API key has {what} at place {place + 1} of {len(key)}; expected printable ASCII without spaces"
    raise ConfigError(f"{problem}. Pass the key alone, without what was printed beside it", param="api_key")


LOGIN_MARK = "#login="
"""What stands before the one-time code in a login link. Browsers do not send this part of an address."""


class Empty(Wire):
    """A body without fields."""


class PageLink(Wire):
    """A one-time code with which a browser opens a session. It may do as much as the key that asked for it."""

    code: str
    expires_at: float
    """Seconds since the epoch."""
