"""Scopes of API keys, which characters a key may have, and how a key opens the page."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from art.errors import ConfigError
from art.protocol.training import Wire

KeyScope = Literal["infer", "train", "admin"]
"""`infer`: sample from models and read records. `train`: register models, train them, manage their checkpoints.
`admin`: everything, with settings that touch the machine: devices, paths, addresses and flags of engines."""


def check_api_key(key: str) -> str:
    """Return the key if an HTTP header can carry it.

    Raises:
        ConfigError: the key has a character that no header may have. The message does not show the key.
    """
    place = next((i for i, character in enumerate(key) if not "!" <= character <= "~"), None)
    if place is None:
        return key
    what = {"\n": "a line break", "\r": "a line break", " ": "a space"}.get(key[place])
    what = what or ("a control character" if key[place].isascii() else "a character outside of ASCII")
    raise ConfigError(
        f"the API key has {what} at place {place + 1} of {len(key)}; expected printable ASCII without spaces. Pass the "
        "key alone, without what was printed or written beside it",
        param="api_key",
    )


LOGIN_MARK = "#login="
"""What stands before the one-time code in a login link. Browsers do not send this part of an address."""


class LoginRequest(Wire):
    """Open a session of the page, by a key or by the one-time code of a login link."""

    key: str | None = Field(default=None, max_length=512)
    code: str | None = Field(default=None, max_length=128)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.key is None) == (self.code is None):
            raise ValueError("give `key` or `code`, and not both")
        return self


class PageSession(Wire):
    """What a request of the page may do: as much as the key that opened its session."""

    key_id: str
    project: str | None
    """The only project that it sees; null for all."""
    scopes: list[KeyScope]
    has_server: bool
    """Whether a server runs. False for `art view`, which reads files only."""
    base_url: str | None
    """Where clients find the server's OpenAI-compatible API; null without a server."""
    version: str
    """Version of ART."""


class Empty(Wire):
    """A body without fields."""


class PageLink(Wire):
    """A one-time code with which a browser opens a session. It may do as much as the key that asked for it."""

    code: str
    expires_at: float
    """Seconds since the epoch."""
